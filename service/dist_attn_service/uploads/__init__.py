"""Files that clients upload: their bytes lie in one folder, their records in one catalogue.

`multipart.py` and `tus.py` read requests, `byte_files.py` holds bytes on disk, `ledger.py` has the records, which
`catalogue.py`, `reservations.py` and `upkeep.py` change in transactions; `service.py` is the one that routes use.
"""
