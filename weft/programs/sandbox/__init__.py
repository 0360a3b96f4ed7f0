"""The sandbox: Python programs from source text and Wasm modules, each in a WebAssembly instance of its own.

`sandbox.Sandbox` makes guests (`weft.programs.guest.Guest`). Inside: `guest` drives one run, `fibers` and `threads` are
the two ways to run its code (`backend` chooses), `imports` is what modules may call, `compiled` keeps machine code,
`bytecode` what Python compiled sources to, `runner` is what runs inside.
"""
