"""What only a GPU can tell: `check.py`, one script of less than four minutes. Tests run it on the fake driver.

`engine.py` the engine's side, torch's or the fake driver's · `bench.py` backends, batches, clocks that sections share ·
`contents.py` `races.py` bytes that must be right · `requests.py` whole requests, and how soon they wake up ·
`speeds.py` `costs.py` `registration.py` figures · `sections.py` all of them, each bounded in time · `report.py` what is
printed.
"""
