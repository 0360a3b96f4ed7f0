"""Programs that ship with Weft, written on the same sequence operations that users' programs have."""
