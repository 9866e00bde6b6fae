"""Files that clients upload: what they hold lies in one folder, what is known of them in one catalogue.

Pure: `multipart.py`, `tus.py`, `ranges.py` (what clients send), `entries.py`, `books.py` (what is recorded).
Then `byte_files.py` (bytes on disk), `catalogue.py` (changes in transactions), `writing.py` (bytes as they arrive) and
`shelf.py`, which is what routes use.
"""
