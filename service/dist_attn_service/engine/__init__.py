"""The API's side of the engine: the connection, the streams of open requests, and the measures of its speed."""
