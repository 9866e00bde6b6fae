"""The API's side of the engine: the connection, the streams of open requests, what is known of its speed."""
