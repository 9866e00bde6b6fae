"""Files that clients upload: what they hold lies in one folder, what is known of them in one catalogue.

`multipart.py` and `tus.py` read what clients send, `byte_files.py` holds bytes on disk, `ledger.py` what is recorded.
`catalogue.py`, `reservations.py` and `upkeep.py` change it in transactions; `service.py` is what routes use.
"""
