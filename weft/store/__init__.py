"""The database layer under uploaded programs, records of runs, and values by name.

SQLAlchemy Core on one SQLite file; the content of programs and large values are files beside it. Higher layers call
`programs`, `runs` and `values`, which hide SQL and paths.
"""
