"""Imports plug-ins, and runs public drafters: read-only views go in, checked drafts come out."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from operator import index as as_index

from foreword.core.outputs import Draft
from foreword.core.request import RequestState
from foreword.errors import ConfigError
from foreword.speculation.drafter import Drafter, DrafterContext, RequestView, TokenSequence
from foreword.speculation.engine_drafter import DraftRequest, EngineDrafter


class _InvalidDraft(ValueError):
    """A result of propose() that is no draft. The message quotes no request."""


class DrafterAdapter(EngineDrafter):
    """A public drafter as an EngineDrafter. The views cannot change a request, and no draft is trusted."""

    is_timed = True

    def __init__(self, name: str, drafter: Drafter, vocab_size: int) -> None:
        self.name = name
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._views: dict[str, RequestView] = {}  # by request id, of live requests

    def start(self, state: RequestState) -> None:
        tokens, salt = TokenSequence(state.tokens), state.request.namespace
        view = RequestView(state.id, tokens, state.num_prompt, cache_salt=salt)
        self._drafter.start(view)
        self._views[state.id] = view

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        view = self._views.pop(request_id, None)
        if view is not None:
            self._drafter.finish(view, tuple(output))

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._views)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """Raises if the drafter does, or if a result is no draft."""
        views = [self._make_view(request) for request in requests]
        returned: object = self._drafter.propose(tuple(views))
        if not isinstance(returned, Iterable):
            raise _InvalidDraft(f"propose() returned {type(returned).__name__}, no list of drafts")
        drafts = list(returned)
        if len(drafts) != len(views):
            raise _InvalidDraft(f"propose() returned {len(drafts)} drafts for {len(views)} requests")
        return [self._check_draft(draft, view.max_tokens) for draft, view in zip(drafts, views, strict=True)]

    def _make_view(self, request: DraftRequest) -> RequestView:
        view = self._views[request.state.id]
        if view.max_tokens != request.max_draft_tokens:  # else the view of the last call serves again
            view = self._views[view.id] = replace(view, max_tokens=request.max_draft_tokens)
        return view

    def _check_draft(self, draft: Draft | Sequence[int] | None, max_tokens: int) -> Draft | None:
        """The draft as plain numbers, which numpy's and torch's are not."""
        if draft is None:
            return None
        given, confidence = (draft.token_ids, draft.confidence) if isinstance(draft, Draft) else (draft, ())
        try:
            items = tuple(islice(given, max_tokens))
            token_ids = tuple(int(as_index(token_id)) for token_id in items)
        except TypeError as error:
            raise _InvalidDraft(f"propose() returned no token ids: {type(given).__name__}") from error
        if any(isinstance(item, bool) for item in items):
            raise _InvalidDraft("propose() returned no token ids: bool")
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                limit = self._vocab_size - 1
                raise _InvalidDraft(f"propose() returned id {token_id}, outside the vocabulary 0..{limit}")
        return (
            Draft(token_ids, self.name, _check_confidence(confidence, len(token_ids))) if token_ids else None
        )


def _check_confidence(confidence: Iterable[float], num_tokens: int) -> tuple[float, ...]:
    """Probabilities of the first `num_tokens` tokens; () where the drafter gave none."""
    try:
        probs = tuple(float(prob) for prob in islice(confidence, num_tokens))
    except (TypeError, ValueError) as error:
        raise _InvalidDraft("confidence must be probabilities, one of each token") from error
    if probs and len(probs) < num_tokens:
        raise _InvalidDraft(f"confidence has {len(probs)} values for {num_tokens} tokens")
    for prob in probs:
        if not 0 <= prob <= 1:
            raise _InvalidDraft(f"confidence must be between 0 and 1, got {prob:g}")
    return probs


def make_plugin(reference: str, in_directory: bool, context: DrafterContext) -> Drafter:
    """Import "module:Class" and make its drafter. Raises ConfigError.

    in_directory  the module may lie in the current directory, as with `python -m`
    """
    module_name, _, class_name = reference.partition(":")
    directory = os.getcwd()
    if in_directory and directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        is_inner = error.name is None or not f"{module_name}.".startswith(f"{error.name}.")
        problem = _describe(error) if is_inner else f"it is neither installed nor in {directory}"
        raise ConfigError(f"speculate: cannot import {module_name}: {problem}", "speculate") from error
    except (Exception, SystemExit) as error:
        problem = f"cannot import {module_name}: {_describe(error)}"
        raise ConfigError(f"speculate: {problem}", "speculate") from error
    drafter_class = getattr(module, class_name, None)
    if drafter_class is None:
        close = difflib.get_close_matches(class_name, vars(module), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"speculate: {module_name} has no class {class_name}{hint}", "speculate")
    if not (isinstance(drafter_class, type) and issubclass(drafter_class, Drafter)):
        raise ConfigError(f"speculate: {reference} is not a subclass of foreword.Drafter", "speculate")
    try:
        return drafter_class(context)
    except (Exception, SystemExit) as error:
        problem = f"{class_name}(context) failed: {_describe(error)}"
        raise ConfigError(f"speculate: {problem}", "speculate") from error


def summarize_error(error: BaseException) -> str:
    """Type and place of an exception, without its message, which may quote a request."""
    if isinstance(error, _InvalidDraft):
        return str(error)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    place = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return type(error).__name__ + place


def _describe(error: BaseException) -> str:
    """An exception of a plug-in that could not be made; no request exists yet."""
    return f"{summarize_error(error)}: {' '.join(str(error).split()):.300}"
