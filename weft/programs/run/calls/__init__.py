"""What a program may ask of its host, by trait: one class each, wired into one table by `weft.programs.run.context`."""
