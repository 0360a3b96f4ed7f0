"""A team writes code: an architect, a programmer per file, and rounds of review.

weft workflow run examples/workflows/coding.py --row task='a snake game'
"""

import weft
from weft import ops

ROUNDS = 2


@weft.semantic_function(max_tokens=60, temperature=0)
def design(task: weft.Input, files: weft.Output):
    """You are a software architect. Name the files of this program, one on each line. Program: {{task}} {{files}}"""


@weft.semantic_function(max_tokens=80, temperature=0)
def write(task: weft.Input, name: weft.Input, code: weft.Output):
    """You are a programmer. The program: {{task}}. Write the file {{name}}. {{code}}"""


@weft.semantic_function(max_tokens=60, temperature=0)
def review(task: weft.Input, code: weft.Input, comments: weft.Output):
    """You are a reviewer. The program: {{task}}. Review this file: {{code}} {{comments}}"""


@weft.semantic_function(max_tokens=80, temperature=0)
def revise(code: weft.Input, comments: weft.Input, better: weft.Output):
    """You are a programmer. Your file: {{code}} The review: {{comments}} Write the file again. {{better}}"""


@weft.flow
def coding(task):
    """Every file goes through its rounds on its own; none waits for another."""

    def one_file(name):
        code = write(task, name)
        for _ in range(ROUNDS):
            code = revise(code, review(task, code))
        return code

    return ops.map(one_file, design(task).strip().split("\n")[:4])
