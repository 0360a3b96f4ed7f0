"""What must work before fibers are used: a tiny module suspends, resumes, computes, is ended, grows, and comes again.

Fibers rest on a private API and a shim; a release, a kernel or a processor may break what they rely on. Knows nothing
of programs. Takes a few milliseconds; called once, by `backend`.
"""

from __future__ import annotations

import wasmtime

from weft.programs.sandbox import bindings

_MODULE = """
(module
  (import "t" "ask" (func $ask (param i32 f64) (result i32)))
  (import "t" "now" (func $now (result f64)))
  (memory (export "memory") 1)
  (func (export "twice") (result i32)
    (i32.add (call $ask (i32.const 7) (f64.const 0.5)) (call $ask (i32.const 8) (f64.const 1))))
  (func (export "clock") (result i32) (f64.gt (call $now) (f64.const 1e9)))
  (func (export "spin") (result i32) (loop $on (br $on)) (unreachable))
  (func (export "grow") (result i32) (memory.grow (i32.const 100)))
  (func (export "deep") (result i32) (call $f (i32.const 0)))
  (func $f (param i32) (result i32) (i32.add (call $f (i32.add (local.get 0) (i32.const 1))) (i32.const 1))))
"""
_SLOTS = 2
_MAX_TURNS = 1_000_000


def check_fibers() -> None:
    """Raise `bindings.BindingsUnavailable` that says what does not work."""
    engine = bindings.pooled_engine(_SLOTS, 1 << 20, components=False)
    ticker = bindings.Ticker(engine, 0.0005)
    try:
        module = wasmtime.Module(engine, _MODULE)
        linker = wasmtime.Linker(engine)
        numbers = [wasmtime.ValType.i32(), wasmtime.ValType.f64()]
        bindings.define_module_import(linker, "t", "ask", wasmtime.FuncType(numbers, numbers[:1]), 3)
        bindings.define_module_import(linker, "t", "now", wasmtime.FuncType([], numbers[1:]), -1)
        pre = linker.instantiate_pre(module)
        _expect(_call(engine, pre, ticker, "clock") == 1, "the clock")
        # More rounds than slots: each must give back what it took.
        for _ in range(_SLOTS + 1):
            _expect(_call(engine, pre, ticker, "twice") == 30, "suspending and resuming")
            _expect(_call(engine, pre, ticker, "spin") is None, "ending code that computes")
            _expect(_call(engine, pre, ticker, "grow") == -1, "the limit on memory")
            _expect(_call(engine, pre, ticker, "deep") is None, "the end of the stack")
    finally:
        ticker.close()


def _expect(is_fine: bool, what: str) -> None:
    if not is_fine:
        raise bindings.BindingsUnavailable(f"the self-test of fibers failed at {what}")


def _call(engine: wasmtime.Engine, pre: wasmtime.InstancePre, ticker: bindings.Ticker, name: str) -> int | None:
    """What a function returns, or None where it trapped or was ended after a few turns."""
    instance = bindings.Instance(engine, 1 << 20)
    try:
        made = instance.instantiate_module(pre)
        _expect(instance.poll(ticker.handle) == bindings.FINISHED and instance.end() is None, "instances")
        function = instance.exported_function(made, name)
        results = instance.call_module(function, 1)
        turns = 0
        for _ in range(_MAX_TURNS):
            state = instance.poll(ticker.handle)
            if state == bindings.FINISHED:
                return int(results[0].of.i32) if instance.end() is None else None
            if state == bindings.PARKED:
                _expect(instance.fields.function == 3 and instance.fields.args[0] in (7, 8), "arguments")
                bindings.shim().weft_answer_i32(instance.fiber, 2 * instance.fields.args[0])
            else:
                turns += 1
                if turns == 3:
                    return None
        raise bindings.BindingsUnavailable("a fiber never gives way")
    finally:
        instance.close()
