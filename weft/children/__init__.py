"""Child processes of a front: start, supervision, stop and restart, from both ends."""
