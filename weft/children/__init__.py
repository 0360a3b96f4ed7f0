"""Child processes of a front: how they are started, watched, stopped and started again, from both ends."""
