"""Compiling source text where there are no files.

Python looks into the file for the line of a syntax error. Here that would end the instance, so a name that no file can
have is given to the compiler, and the real one is put in its place afterwards.
"""

import __future__

import builtins
import os
import sys
import types

_UNREADABLE = "\ud800"
_compile, _exec, _eval = builtins.compile, builtins.exec, builtins.eval
_ONLY_AST = 0x400


def _named(code, name):
    constants = tuple(_named(item, name) if isinstance(item, types.CodeType) else item for item in code.co_consts)
    return code.replace(co_filename=name, co_consts=constants)


def compile_without_files(source, filename, mode, flags=0, dont_inherit=False, optimize=-1, **others):
    name = os.fsdecode(filename)
    if not dont_inherit:
        flags |= sys._getframe(1).f_code.co_flags & __future__.annotations.compiler_flag
    try:
        code = _compile(source, _UNREADABLE, mode, flags, True, optimize, **others)
    except SyntaxError as error:
        error.filename = name
        if not error.text and error.lineno and isinstance(source, str):
            error.text = "".join(source.splitlines(True)[error.lineno - 1 : error.lineno])
        raise error from None
    return code if flags & _ONLY_AST else _named(code, name)


def exec_without_files(source, globals=None, locals=None, /, *, closure=None):
    if globals is None:
        frame = sys._getframe(1)
        globals, locals = frame.f_globals, frame.f_locals if locals is None else locals
    if not isinstance(source, types.CodeType):
        source = compile_without_files(source, "<string>", "exec")
    _exec(source, globals, globals if locals is None else locals, closure=closure)


def eval_without_files(source, globals=None, locals=None, /):
    if globals is None:
        frame = sys._getframe(1)
        globals, locals = frame.f_globals, frame.f_locals if locals is None else locals
    if not isinstance(source, types.CodeType):
        text = source.lstrip(" \t") if isinstance(source, str) else source
        source = compile_without_files(text, "<string>", "eval")
    return _eval(source, globals, globals if locals is None else locals)
