"""Questions and answers: answers come from docs/faq.md, other wordings from questions.txt."""

import re
from functools import cache
from random import Random

from training import everyday, page
from training.tasks import Sample

FALLBACK = (
    "I am a small demonstration model and do not know that. Ask me about Foreword, or give me a text to edit."
)
_GREETINGS = {
    "Hello! Ask me about Foreword, or give me a text to edit.": "Hello|Hi|Hey|Good morning|"
    "Hello there|Good evening|Hi there|How are you?|How are you doing?|What's up?|Nice to meet you|"
    "Hello, how are you?|Is anyone there?|Hey there|Hi, how are you today?|Test|Yo",
    "You are welcome.": "Thanks|Thank you|Thank you very much|Thanks a lot|Great, thanks|Nice|"
    "Good|OK|Ok, thanks|Cool|Great|Well done|Perfect",
    "Goodbye!": "Bye|Goodbye|See you|Bye bye|See you later",
}


@cache
def wordings() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the wordings of each question: those for training (with the heading), and the held-out ones."""
    train, held_out = {}, {}
    for block in (page.FOLDER / "questions.txt").read_text(encoding="utf-8").split("\n\n")[1:]:
        question, *lines = block.strip().splitlines()
        train[question] = [question] + [line[2:] for line in lines if line.startswith("- ")]
        held_out[question] = [line[2:] for line in lines if line.startswith("? ")]
    return train, held_out


def normalize(question: str) -> str:
    """Reduce a question to its lower-case words: case and punctuation make no new wording."""
    return " ".join(re.findall(r"[\w-]+", question.casefold()))


@cache
def _forbidden() -> frozenset[str]:
    return frozenset(normalize(one) for several in wordings()[1].values() for one in several)


def _typo(rng: Random, text: str) -> str:
    at = rng.randrange(1, len(text) - 1)
    if rng.random() < 0.5:
        return text[:at] + text[at + 1 :]
    return text[: at - 1] + text[at] + text[at - 1] + text[at + 1 :]


# Equivalent openings: (pattern, replacements).
_OPENINGS = (
    (
        r"^How (?:do|can) I ",
        "How do I |How can I |How could I |How would I |How to |"
        "What must I do to |I want to know how to |Show me how to |"
        "What is the way to ",
    ),
    (
        r"^(?:Which|What) (?=[a-z]+ (?:are|can|does|do|is|starts|turns|sets|measures|checks)\b)",
        "Which |What ",
    ),
    (
        r"^(?:Explain|Describe|Define) ",
        "Explain |Describe |Can you explain |Could you explain |Please explain |"
        "Tell me about |I do not understand ",
    ),
    (
        r"^Tell me about ",
        "Tell me about |Tell me something about |Can you tell me about |"
        "What can you tell me about |I want to know about |"
        "Talk about ",
    ),
    (r"^What is ", "What is |What's |Do you know what is |Can you say what is |Explain what is "),
    (
        r"^What happens (?:when|if|with|to) ",
        "What happens when |What happens if |What is done when |What if |What will happen if ",
    ),
    (r"^Why ", "Why |Can you explain why |Tell me why |For what reason "),
    (r"^Does (?:it|Foreword) ", "Does it |Does Foreword |Will it |Does the engine |Can it "),
    (r"^Can I ", "Can I |May I |Is it possible to |Am I able to |Could I "),
)
_BEFORE = (
    "Hello! |Hi, |Please tell me: |I have a question. |Quick question: |And |So, |Well, |Now tell me, |Hey, |"
    "One more question: |Please: "
)
_AFTER = " please?|, please?| exactly?|? Thanks!| in short?|? Be brief.|??| here?| then?|."


def _one_of(rng: Random, options: str) -> str:
    return rng.choice(options.split("|"))


def reword(rng: Random, question: str) -> str:
    """Replace the opening of a question by an equivalent one."""
    for pattern, others in _OPENINGS:
        if re.search(pattern, question):
            return re.sub(pattern, _one_of(rng, others), question)
    return question


def vary(rng: Random, question: str) -> str:
    """Wrap a question as users do: politeness, lower case, a missing mark, a typo."""
    first_lower = question[0].lower() + question[1:]
    kind = rng.random()
    if kind < 0.35:
        text = question
    elif kind < 0.5:
        text = first_lower.rstrip("?.")
    elif kind < 0.75:
        text = _one_of(rng, _BEFORE) + rng.choice((question, first_lower))
    else:
        text = question.rstrip("?.") + _one_of(rng, _AFTER)
    return _typo(rng, text) if rng.random() < 0.06 else text


def ask(rng: Random, size: int) -> Sample:
    """Ask a question of the FAQ in one of its trained wordings."""
    train = wordings()[0]
    question = rng.choice(list(train))
    wording = rng.choice(train[question])
    bare = reword(rng, wording) if rng.random() < 0.5 else wording
    text = vary(rng, bare)
    if any(one in _forbidden() for one in (normalize(bare), normalize(text))):
        return ask(rng, size)
    return Sample("faq", text, page.answers()[question])


def unknown(rng: Random, size: int) -> Sample:
    """Ask a question that the model cannot answer."""
    question = everyday.question(rng)
    text = vary(rng, question) if len(question) > 3 else question
    if everyday.is_held_out(question) or everyday.is_held_out(text):
        return unknown(rng, size)
    return Sample("unknown", text, FALLBACK)


def greet(rng: Random, size: int) -> Sample:
    """Say hello, thanks or goodbye."""
    answer = rng.choice(list(_GREETINGS))
    text = _one_of(rng, _GREETINGS[answer]) + rng.choice(("", ".", "!")).replace("?.", "?")
    return Sample("greeting", text if rng.random() < 0.7 else text.lower(), answer)
