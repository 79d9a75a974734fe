"""Scripts of an agent: deterministic, consistent with the files, and of the size asked for."""

import statistics

import pytest

from foreword.bench.agent.workload import MAX_STEPS, MIN_STEPS, TOOLS, Sources, make_script


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources()


def count(text: str) -> int:
    return len(text) // 4 + 1


def test_script_is_a_function_of_its_number(sources: Sources) -> None:
    assert make_script(7, sources, 4096, count) == make_script(7, sources, 4096, count)
    assert make_script(7, sources, 4096, count) != make_script(8, sources, 4096, count)


@pytest.mark.parametrize("context", [2048, 8192, 30720])
def test_scripts_have_the_steps_and_about_the_context_asked_for(sources: Sources, context: int) -> None:
    sizes = []
    for number in range(8):
        script = make_script(number, sources, context, count)
        assert MIN_STEPS <= len(script.steps) <= MAX_STEPS
        texts = [script.system, script.task, script.summary]
        for step in script.steps:
            texts += [step.text, *map(str, step.arguments.values()), step.result]
        sizes.append(sum(map(count, texts)))
    assert 0.6 * context < statistics.median(sizes) < 1.3 * context
    assert max(sizes) < 2 * context


def test_calls_fit_the_tools_and_edits_repeat_what_was_read(sources: Sources) -> None:
    required = {tool.name: set((tool.parameters or {})["required"]) for tool in TOOLS}
    kinds = set()
    for number in range(12):
        script, read = make_script(number, sources, 8192, count), ""
        for step in script.steps:
            assert set(step.arguments) == required[step.tool]
            kinds.add(step.tool)
            if step.tool == "edit":
                lines = step.arguments["old_string"].splitlines()
                assert any(f"\t{line}" in read for line in lines)
                assert (
                    step.arguments["new_string"].count("\n") == step.arguments["old_string"].count("\n") + 1
                )
            read += step.result
    assert kinds == set(required)
