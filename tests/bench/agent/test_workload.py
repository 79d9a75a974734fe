"""Scripts of an agent: deterministic, consistent with the files, and of the size asked for."""

import statistics
from random import Random

import pytest

from foreword.bench.agent.sources import Sources
from foreword.bench.agent.styles import ALL_TOOLS, HELD_OUT, SETS, TUNING
from foreword.bench.agent.workload import MAX_STEPS, MIN_STEPS, Edit, Editor, make_script
from tests.support.budget import some_of


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources()


def count(text: str) -> int:
    return len(text) // 4 + 1


def test_script_is_a_function_of_its_number(sources: Sources) -> None:
    assert make_script(7, sources, 4096, count) == make_script(7, sources, 4096, count)
    assert make_script(7, sources, 4096, count) != make_script(8, sources, 4096, count)


@pytest.mark.parametrize("of_set", SETS)
@pytest.mark.parametrize("context", [2048, 8192, 30720])
def test_scripts_have_the_steps_and_about_the_context_asked_for(
    sources: Sources, context: int, of_set: str
) -> None:
    sizes = []
    for number in range(8):
        script = make_script(number, sources, context, count, of_set)
        assert MIN_STEPS <= len(script.steps) <= MAX_STEPS
        texts = [script.system, script.task, script.summary]
        for step in script.steps:
            texts += [step.text, *map(str, step.arguments.values()), step.result]
        sizes.append(sum(map(count, texts)))
    assert 0.5 * context < statistics.median(sizes) < 1.4 * context
    assert max(sizes) < 3 * context


def test_sets_share_neither_files_nor_styles(sources: Sources) -> None:
    for language in sources.languages:
        halves = [sources.corpus(language, half) for half in (0, 1)]
        assert not halves[0].texts.keys() & halves[1].texts.keys() and all(half.paths for half in halves)
    assert not {style.edit.tool for style in TUNING} & {style.edit.tool for style in HELD_OUT}
    assert not {style.line for style in TUNING} & {
        style.line for style in HELD_OUT if style.name != "line_range"
    } - {"{line}"}


@pytest.mark.parametrize("of_set", some_of(SETS, 2))
def test_calls_fit_the_tools(sources: Sources, of_set: str) -> None:
    known = {tool.name: set((tool.parameters or {})["properties"]) for tool in ALL_TOOLS}
    used = set()
    for number in range(64):  # a tool of one style is rare
        for step in make_script(number, sources, 8192, count, of_set).steps:
            assert set(step.arguments) <= known[step.tool] and set(step.places) == set(step.arguments)
            used.add(step.tool)
    assert used == {tool.name for style in SETS[of_set] for tool in style.tools()}


def test_edits_repeat_what_was_read(sources: Sources) -> None:
    num_lines = num_read = 0
    for number in (0, 4, 8, 12):  # the style "edit"
        script, read = make_script(number, sources, 8192, count), ""
        for step in script.steps:
            if step.tool == "Edit":
                lines = [line for line in step.arguments["old_string"].splitlines() if line.strip()]
                num_lines += len(lines)
                num_read += sum(f"→{line}" in read for line in lines)
                assert step.arguments["old_string"] != step.arguments["new_string"]
            read += step.result
    assert num_read > 0.6 * num_lines > 30


@pytest.mark.parametrize("language", ["python", "c++", "javascript"])
def test_notations_of_an_edit_describe_the_same_change(sources: Sources, language: str) -> None:
    corpus = sources.corpus(language, 0)
    lines = corpus.texts[corpus.paths[0]].splitlines()
    kinds = set()
    for number in range(60):
        rng = Random(number)
        shown = range(20, 40)
        edit = Editor(rng, corpus, corpus.names[corpus.paths[0]][0], "renamed").edit(
            lines, rng.choice(shown), shown
        )
        assert shown.start <= edit.first and edit.first + len(edit.old) <= shown.stop
        end = edit.first + len(edit.old)
        assert edit.old == tuple(lines[edit.first : end])
        assert edit.apply(lines) == [*lines[: edit.first], *edit.new, *lines[end:]]
        marked = edit.marked()
        assert [line[1:] for line in marked if line[0] in " -"] == list(edit.old)
        assert [line[1:] for line in marked if line[0] in " +"] == list(edit.new)
        assert "\n".join(marked) in edit.unified("a") and "\n".join(marked) in edit.patch("a", lines)
        kinds.add((len(edit.new) > len(edit.old)) - (len(edit.new) < len(edit.old)))
    assert kinds == {-1, 0, 1}


def test_blocks_hold_both_texts() -> None:
    edit = Edit(3, ("a", "b"), ("a", "c", "d"), 1, 0)
    assert edit.blocks() == "<<<<<<< SEARCH\na\nb\n=======\na\nc\nd\n>>>>>>> REPLACE"
    assert edit.unified("x.py") == "--- a/x.py\n+++ b/x.py\n@@ -4,2 +4,3 @@\n a\n-b\n+c\n+d\n"
