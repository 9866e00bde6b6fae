"""Files that clients upload: what they hold lies in one folder, what is known of them in one catalogue.

Pure: `multipart.py`, `tus.py`, `ranges.py` (what clients send), `entries.py`, `ledger.py` (what is recorded).
Then `byte_files.py` (bytes on disk), `catalogue.py`, `reservations.py`, `file_records.py` (changes in transactions),
`writing.py` (bytes as they arrive) and `service.py`, which is what routes use.
"""
