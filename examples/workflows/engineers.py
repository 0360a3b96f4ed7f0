"""Engineers: calls that run as they are made, in a session, with variables that are futures.

The code goes from one call to the next within the service; the plan is read while the tests are still written.
"""

import sys

import weft


@weft.semantic_function(max_tokens=60)
def write(task: weft.Input, plan: weft.Output(temperature=0), code: weft.Output(temperature=0, stop="END")):
    """You are an engineer. Task: {{task}}. Your plan: {{plan}} Now the code: {{code}}"""


@weft.semantic_function(max_tokens=60, temperature=0)
def test(task: weft.Input, code: weft.Input, tests: weft.Output):
    """You are a QA engineer. Task: {{task}}. Code: {{code}}. Tests: {{tests}}"""


def build(task, on):
    """The plan, the code and the tests for a task."""
    with weft.session(on=on):
        made = write(task)  # a named tuple of variables, at once
        tests = test(task, made.code)
        return {"plan": made.plan.get(), "code": made.code.get(), "tests": tests.get()}


if __name__ == "__main__":
    if len(sys.argv) > 1:  # the address of a server
        print(build("a snake game", sys.argv[1]))
    else:
        with weft.LLM("weft-tiny") as llm:
            print(build("a snake game", llm))
