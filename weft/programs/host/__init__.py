"""Hosts of programs: `program_host` runs programs in its own process, `client` in a child process that it supervises.

`process` is the child's entry point, `wire` the messages between the two, `run_task` one run, `guest_factory` and
`trusted` what runs the program's code outside the sandbox's machines.
"""
