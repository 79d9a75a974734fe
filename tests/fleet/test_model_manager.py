"""Several models in one server: loads, waits, refusals and unloads, with fake engines."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foreword.config.models_file import ModelVariant
from foreword.config.options import Config
from foreword.errors import CheckpointError
from foreword.server import app, registry
from foreword.utils.logging import set_up_logging
from tests.server.auth.test_keys import key_of, write
from tests.support.fake_models import CHAT, Call, FakeFleet, fleet
from tests.support.fakes import FakeOutput
from tests.support.waiting import wait_until_async

HELD = FakeOutput("Hello", hang_after=2)
TO_STREAM = {CHAT: {}, "/v1/messages": {}, "/v1/responses": {"input": "Hi"}}


async def held(fakes: FakeFleet, model: str) -> Call:
    """A stream that has begun and does not end."""
    call = fakes.call(model=model, stream=True)
    await wait_until_async(lambda: call.body)
    return call


async def test_models_are_loaded_on_demand_and_the_first_is_the_default() -> None:
    async with fleet("a", "b") as fakes:
        assert fakes.loads == [] and (await fakes.get("/health")).status == 200
        assert (await fakes.ask(model="b")).json()["model"] == "b"
        assert fakes.loads == ["b"]
        assert (await fakes.ask()).json()["model"] == "a"
        assert fakes.loads == ["b", "a"] and fakes.loaded == {"a", "b"}


async def test_pinned_model_that_is_alone_is_the_server() -> None:
    async with fleet("a", entries={"a": {"pinned": True}}, is_open=False) as fakes:
        health = await fakes.get("/health")
        assert (health.status, health.json()["status"]) == (503, "loading")
        await wait_until_async(lambda: fakes.engines)
        assert (await fakes.get("/health")).json()["progress"] == 0.42
        fakes.gates["a"].set()
        await fakes.manager.wait_ready()
        assert (await fakes.get("/health")).status == (await fakes.ask()).status == 200
        for body in ({"path": "/models/unload"}, {"path": "/models/load", "pin": False}):
            refused = await fakes.ask(model="a", **body)
            assert refused.status == 400 and "which stays loaded" in refused.text
        fakes.engine("a").die()
        await fakes.manager.dead.wait()
        assert (await fakes.get("/health")).json()["status"] == "dead"
        assert (await fakes.ask()).code == "engine_dead" and fakes.loads == ["a"]


async def test_load_error_of_a_model_that_is_alone_ends_the_server() -> None:
    async with fleet("a", entries={"a": {"pinned": True}}, is_open=False) as fakes:
        fakes.load_errors["a"] = CheckpointError("model.safetensors is damaged")
        fakes.gates["a"].set()
        with pytest.raises(CheckpointError, match="damaged"):
            await fakes.manager.wait_ready()


async def test_model_that_is_alone_with_keep_alive_is_unloaded_and_loaded_again() -> None:
    async with fleet("a", entries={"a": {"preload": True, "keep_alive": 0.0}}) as fakes:
        await fakes.manager.wait_ready()
        await wait_until_async(lambda: fakes.engines and fakes.engines[0].is_closed)
        assert (await fakes.get("/health")).status == (await fakes.ask()).status == 200
        assert fakes.loads == ["a", "a"] and not fakes.manager.dead.is_set()


async def test_requests_of_a_loading_model_join_its_load() -> None:
    async with fleet("a", "b", is_open=False) as fakes:
        calls = [fakes.call(model="a"), fakes.call(model="a"), fakes.call("/tokenize", prompt="x", model="a")]
        await wait_until_async(lambda: fakes.manager.status("a").waiting_requests == 3)
        card = await fakes.card("a")
        assert (card["status"], card["progress"], card["waiting_requests"]) == ("loading", 0.42, 3)
        assert (await fakes.get("/ready")).status == 200
        fakes.gates["a"].set()
        assert [(await call.ended()).status for call in calls] == [200] * 3
        assert fakes.loads == ["a"] and fakes.manager.status("a").open_requests == 0


async def test_no_model_is_unloaded_under_an_open_answer() -> None:
    async with fleet("a", "b", "c", script=HELD) as fakes:
        streams = {name: await held(fakes, name) for name in ("a", "b")}
        third = fakes.call(model="c", stream=True)
        await wait_until_async(lambda: fakes.manager.status("c").waiting_requests)
        assert fakes.loaded == {"a", "b"} and (await fakes.card("a"))["open_requests"] == 1
        streams["b"].disconnect()
        await wait_until_async(lambda: third.body)
        assert fakes.loaded == {"a", "c"} and fakes.engines[1].is_closed
        streams["a"].disconnect()
        third.disconnect()
        await streams["a"].ended()
        await third.ended()


async def test_failed_load_is_named_and_other_models_answer() -> None:
    async with fleet("a", "b") as fakes:
        fakes.load_errors["a"] = CheckpointError("model.safetensors is damaged")
        refused = await fakes.ask(model="a")
        assert (refused.status, refused.code) == (503, "model_load_failed")
        assert "'a' cannot be loaded: model.safetensors is damaged" in refused.text
        assert int(refused.headers["retry-after"]) >= 1
        card = await fakes.card("a")
        assert (card["status"], card["error"]) == ("failed", "model.safetensors is damaged")
        assert (await fakes.ask(model="b")).status == 200
        # An operator's load tries at once.
        assert (await fakes.ask("/models/load", model="a")).json()["status"] == "loading"
        assert (await fakes.ask(model="a")).status == 200 and (await fakes.card("a"))["error"] is None


async def test_unexpected_error_of_a_load_is_not_shown_to_clients() -> None:
    async with fleet("a", "b") as fakes:
        fakes.load_errors["a"] = KeyError("a secret")
        refused = await fakes.ask(model="a")
        assert refused.code == "model_load_failed" and "secret" not in refused.text


async def test_model_that_can_never_fit_is_refused_with_the_arithmetic() -> None:
    pinned = {name: {"pinned": True} for name in ("a", "b")}
    async with fleet("a", "b", "c", entries=pinned) as fakes:
        await wait_until_async(lambda: fakes.loaded == {"a", "b"})
        refused = await fakes.ask(model="c")
        assert (refused.status, refused.code) == (400, None)
        assert "c needs 100 B; models may use 200 B, of which pinned models take 200 B" in refused.text
        assert (await fakes.ask("/models/load", model="c")).status == 400
        assert (await fakes.ask(model="a")).status == 200


async def test_dead_engine_ends_its_model_only_and_a_later_request_loads_it_again() -> None:
    async with fleet("a", "b", script=HELD) as fakes:
        stream, other = await held(fakes, "a"), await held(fakes, "b")
        fakes.engine("a").die()
        await stream.ended()
        assert "engine_dead" in stream.text
        await wait_until_async(lambda: fakes.engines[0].is_closed)
        card = await fakes.card("a")
        assert card["status"] == "failed" and "engine died" in card["error"] and card["memory_bytes"] is None
        refused = await fakes.ask(model="a")
        assert (refused.status, refused.code) == (503, "model_load_failed")
        assert (await fakes.get("/health")).status == 200
        fakes.manager.load("a")  # before the backoff has passed
        again = await held(fakes, "a")
        assert fakes.loads == ["a", "b", "a"] and fakes.loaded == {"a", "b"}
        for call in (other, again):
            call.disconnect()
            await call.ended()


async def test_reload_keeps_its_model_and_passes_those_that_are_unloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet("a", "b", "c") as fakes:
        for name in ("a", "b"):
            await fakes.ask(model=name)
        is_replaced = asyncio.Event()

        async def reload() -> AsyncIterator[str]:
            yield "replacing"
            await is_replaced.wait()
            yield "ready"

        monkeypatch.setattr(fakes.engine("a"), "reload", reload)
        call = fakes.call("/admin/reload")
        await wait_until_async(lambda: call.body)
        for name in ("a", "b"):
            await fakes.ask("/models/unload", model=name)
        await wait_until_async(lambda: fakes.manager.status("b").status == "unloaded")
        assert fakes.loaded == {"a"} and fakes.manager.status("a").open_requests == 1
        is_replaced.set()
        lines = [json.loads(line) for line in (await call.ended()).text.splitlines()]
        assert lines == [{"status": "a: replacing"}, {"status": "a: ready"}]
        await wait_until_async(lambda: fakes.manager.status("a").status == "unloaded")
        assert fakes.loads == ["a", "b"]


async def test_disconnect_while_waiting_frees_everything() -> None:
    async with fleet("a", "b", is_open=False) as fakes:
        calls = [fakes.call(model="a", stream=stream) for stream in (False, True)]
        admission = fakes.manager.models.admission
        await wait_until_async(lambda: admission.num_open == 2)
        for call in calls:
            call.disconnect()
            await call.ended()
        assert admission.num_open == 0 and fakes.manager.status("a").waiting_requests == 0


async def test_wait_is_bounded_by_queue_timeout() -> None:
    config = Config(queue_timeout=0.05)
    async with fleet("a", "b", config=config, is_open=False) as fakes:
        refused = await fakes.ask(model="a")
        assert (refused.status, refused.code) == (429, "overloaded") and "'a' was not loaded" in refused.text
        assert fakes.manager.models.admission.num_open == 0
        assert fakes.manager.status("a").waiting_requests == 0
        assert 'rejected_total{reason="queue_timeout"} 1.0' in (await fakes.get("/metrics")).text


async def test_waiting_requests_count_as_open() -> None:
    async with fleet("a", "b", config=Config(max_waiting=1), is_open=False) as fakes:
        first = fakes.call(model="a")
        await wait_until_async(lambda: fakes.manager.models.admission.num_open)
        assert (await fakes.ask(model="a")).status == 429
        fakes.gates["a"].set()
        assert (await first.ended()).status == 200


@pytest.mark.parametrize("path", TO_STREAM)
async def test_stream_that_waits_gets_comments_and_then_its_answer(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(registry, "COMMENT_INTERVAL_S", 0.01)
    async with fleet("a", "b", script=FakeOutput(bursts=(16,)), is_open=False) as fakes:
        call = fakes.call(path, model="a", stream=True, **TO_STREAM[path])
        await wait_until_async(lambda: b": loading a 42%\n\n" in call.body)
        assert call.status == 200 and call.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in call.headers and "x-request-id" in call.headers
        fakes.gates["a"].set()
        await call.ended()
        comments, _, events = call.text.rpartition("%\n\n")
        assert "Hello world" in events and '"error":{' not in events and ": loading" in comments


@pytest.mark.parametrize("path", TO_STREAM)
async def test_refusal_after_comments_is_the_last_event_in_the_form_of_its_api(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(registry, "COMMENT_INTERVAL_S", 0.01)
    async with fleet("a", "b", is_open=False) as fakes:
        fakes.load_errors["a"] = CheckpointError("the file is damaged")
        call = fakes.call(path, model="a", stream=True, **TO_STREAM[path])
        await wait_until_async(lambda: call.body)
        fakes.gates["a"].set()
        await call.ended()
        head, _, data = call.text.removesuffix("data: [DONE]\n\n").rpartition("data: ")
        event = json.loads(data)
        error = event if path == "/v1/responses" else event["error"]
        assert (error["code"], call.status) == ("model_load_failed", 200) and "damaged" in error["message"]
        assert call.text.endswith("[DONE]\n\n") == (path == CHAT)
        assert head.endswith("event: error\n") == (path != CHAT)
        assert path == CHAT or event["type"] == "error"


async def test_refusal_before_a_comment_has_its_own_status() -> None:
    async with fleet("a", "b") as fakes:
        assert (await fakes.ask(model="a", stream=True, temperature=-1)).status == 400


async def test_unknown_model_lists_those_that_the_key_may_use(tmp_path: Path) -> None:
    write(tmp_path / "keys", key_of("alice", models=("b",)), key_of("root", admin=True))
    config = Config(api_key_file=str(tmp_path / "keys"))
    async with fleet("a", "b", config=config, variants=(ModelVariant("a:x"),)) as fakes:
        for key, allowed in (("alice", "'b'"), ("root", "'a' and 'a:x' and 'b'")):
            refused = await fakes.ask(model="nix", key=key)
            assert (refused.status, refused.code) == (404, "model_not_found")
            assert refused.json()["error"]["message"].endswith(f"this server serves {allowed}")
        for name in ("a", "a:x", None):
            refused = await fakes.ask(model=name, key="alice")
            assert (refused.status, refused.code) == (403, "forbidden")
        assert fakes.loads == [], "a refused request loaded a model"
        assert (await fakes.ask(model="b", key="alice")).status == 200
        assert [card["id"] for card in (await fakes.get("/v1/models", "alice")).json()["data"]] == ["b"]
        assert (await fakes.ask("/models/load", key="alice", model="b")).status == 403
        assert (await fakes.ask("/models/unload", key="root", model="b")).status == 200
        assert 'rejected_total{reason="forbidden"} 4.0' in (await fakes.get("/metrics")).text


async def test_key_of_a_variant_may_not_use_the_model(tmp_path: Path) -> None:
    write(tmp_path / "keys", key_of("x", models=("a:x",)), key_of("base", models=("a",)))
    config = Config(api_key_file=str(tmp_path / "keys"))
    async with fleet("a", "b", config=config, variants=(ModelVariant("a:x"),)) as fakes:
        for _ in ("not loaded", "loaded"):
            statuses = {
                (key, name): (await fakes.ask(model=name, key=key)).status
                for key in ("x", "base")
                for name in ("a", "a:x")
            }
            assert statuses == {("x", "a"): 403, ("x", "a:x"): 200, ("base", "a"): 200, ("base", "a:x"): 200}


async def test_variant_has_defaults_and_a_context_of_its_own() -> None:
    variant = ModelVariant("a:x", {"temperature": 0.25, "max_tokens": 3}, "off", 24)
    async with fleet("a", "b", variants=(variant,)) as fakes:
        answer = await fakes.ask(model="a:x", max_tokens=None)
        assert answer.json()["model"] == "a:x"
        await fakes.ask(model="a:x", temperature=0.5, speculation="suffix", max_tokens=2)
        await fakes.ask(model="a")
        defaults, given, base = (request.params for request in fakes.engine("a").submitted)
        assert (defaults.temperature, defaults.max_tokens, defaults.speculation.method) == (0.25, 3, "off")
        assert (given.temperature, given.max_tokens, given.speculation.method) == (0.5, 2, "suffix")
        assert (base.temperature, base.speculation.method) == (1.0, "auto")
        too_long = await fakes.ask("/v1/completions", model="a:x", prompt="x" * 24)
        assert (too_long.status, too_long.code) == (400, "context_length_exceeded")
        assert (await fakes.ask("/v1/completions", model="a", prompt="x" * 24)).status == 200
        completion = await fakes.ask("/v1/completions", model="a:x", prompt="x")
        assert completion.json()["usage"]["completion_tokens"] == 3, "not the 16 of OpenAI"
        card = await fakes.card("a:x")
        assert (card["parent"], card["variant_of"], card["max_model_len"]) == ("a", "a", 24)
        assert card["sampling_defaults"] == {"temperature": 0.25, "max_tokens": 3}
        assert fakes.loads == ["a"]


async def test_operator_loads_pins_and_unloads() -> None:
    async with fleet("a", "b", "c") as fakes:
        body = (await fakes.ask("/models/load", model="a", pin=True)).json()
        assert body["success"] is True and body["pinned"] is True
        for name in ("b", "c", "b"):
            assert (await fakes.ask(model=name)).status == 200
        assert fakes.loads == ["a", "b", "c", "b"] and fakes.loaded == {"a", "b"}
        await fakes.unload("a")
        text = (await fakes.get("/metrics")).text
        assert 'foreword_model_unloads_total{model="a",reason="requested"} 1.0' in text
        assert 'foreword_model_unloads_total{model="b",reason="evicted"} 1.0' in text
        assert 'foreword_model_loads_total{model="b"} 2.0' in text
        assert (await fakes.ask("/models/load", model="a", pinn=True)).status == 400


async def test_keep_alive_unloads_an_idle_model() -> None:
    async with fleet("a", "b", entries={"a": {"keep_alive": 0.0}}) as fakes:
        await fakes.ask(model="a")
        await wait_until_async(lambda: fakes.manager.status("a").status == "unloaded")
        text = (await fakes.get("/metrics")).text
        assert 'foreword_model_unloads_total{model="a",reason="keep_alive"} 1.0' in text


async def test_preloaded_model_is_there_before_a_request() -> None:
    async with fleet("a", "b", entries={"b": {"preload": True}}) as fakes:
        await wait_until_async(lambda: fakes.loaded == {"b"})


async def test_metrics_have_the_label_of_their_model_and_counters_never_fall() -> None:
    async with fleet("a", "b") as fakes:
        for name in ("a", "b", "a"):
            await fakes.ask(model=name)
        await fakes.unload("a")
        await fakes.ask(model="a")
        families = list(text_string_to_metric_families((await fakes.get("/metrics")).text))
        names = [family.name for family in families]
        assert len(names) == len(set(names))
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }
        generated = "foreword_generation_tokens_total"
        assert samples[generated, "a"] == 3 * samples[generated, "b"] > 0
        assert samples["foreword_models_loaded",] == 2
        assert samples["foreword_http_requests_total", CHAT, "200"] == 4
        without = {
            sample.name
            for family in families
            for sample in family.samples
            if "model" not in sample.labels and not sample.name.startswith("process_")
        }
        assert without == {
            "foreword_event_loop_stall_seconds_bucket",
            "foreword_event_loop_stall_seconds_count",
            "foreword_event_loop_stall_seconds_sum",
            "foreword_http_requests_total",
            "foreword_ignored_message_fields_total",
            "foreword_models_loaded",
            "foreword_requests_rejected_total",
            "foreword_usage_db_errors_total",
        }


async def test_clients_share_stored_responses_across_models() -> None:
    async with fleet("a", "b") as fakes:
        first = (await fakes.ask("/v1/responses", model="a", input="Hi")).json()
        body = {"model": "b", "input": "And?", "previous_response_id": first["id"]}
        assert (await fakes.ask("/v1/responses", **body)).json()["model"] == "b"
        prompt = bytes(token for token in fakes.engine("b").submitted[0].prompt_ids if token < 256)
        assert b"Hello world" in prompt


async def test_adapters_loaded_by_clients_come_back_with_their_model(tmp_path: Path) -> None:
    (tmp_path / "tuned").mkdir()
    config = Config(
        enable_lora=True, allow_runtime_lora_updating=True, lora_dir=str(tmp_path), lora_modules=None
    )
    async with fleet("a", "b", config=config) as fakes:
        load = {"lora_name": "tuned", "lora_path": "tuned", "base_model_name": "b"}
        card = (await fakes.ask("/v1/load_lora_adapter", **load)).json()
        assert (card["id"], card["parent"]) == ("tuned", "b")
        assert (await fakes.ask("/v1/load_lora_adapter", **{**load, "lora_name": "a"})).status == 400
        await fakes.unload("b")
        assert (await fakes.card("tuned"))["status"] == "unloaded"
        fakes.call(model="tuned")
        await wait_until_async(lambda: fakes.loads == ["b", "b"])
        (module,) = fakes.engines[1].config.adapters
        assert (module.name, module.path) == ("tuned", str(tmp_path / "tuned"))


async def test_options_of_a_model_hold_for_it_alone(tmp_path: Path) -> None:
    (tmp_path / "tuned").mkdir()
    options = {"allow_runtime_lora_updating": True, "enable_lora": True, "lora_dir": str(tmp_path)}
    async with fleet("a", "b", options={"b": {**options, "queue_timeout": 0.05}}, is_open=False) as fakes:
        refused = await fakes.ask(model="b")
        assert (refused.status, refused.code) == (429, "overloaded")
        for gate in fakes.gates.values():
            gate.set()
        load = {"lora_name": "tuned", "lora_path": "tuned"}
        assert (await fakes.ask("/v1/load_lora_adapter", **load, base_model_name="b")).status == 200
        other = {**load, "lora_name": "other"}
        assert (await fakes.ask("/v1/load_lora_adapter", **other, base_model_name="a")).status == 403
        assert (await fakes.ask("/v1/unload_lora_adapter", lora_name="tuned")).status == 200


async def test_routes_of_replicas_are_those_of_the_models_file() -> None:
    key = "a key of the engines"
    router = {"replicas": 0, "replica_urls": "http://a", "engine_key": key}
    async with fleet("a", "b", config=Config(engine_key=key), options={"b": router}) as fakes:
        assert (await fakes.get("/engine/replicas", key)).json() == {"models": []}
        assert (await fakes.ask("/engine/sessions", key)).status == 404, "a router has no engine for others"


async def test_admin_lists_and_aborts_requests_of_all_models(tmp_path: Path) -> None:
    write(tmp_path / "keys", key_of("root", admin=True))
    config = Config(api_key_file=str(tmp_path / "keys"))
    async with fleet("a", "b", config=config, script=HELD) as fakes:
        calls = [fakes.call(model=name, key="root") for name in ("a", "b")]
        await wait_until_async(lambda: len(fakes.manager.models.live_requests()) == 2)
        listed = (await fakes.get("/admin/requests", "root")).json()["requests"]
        for request in listed:
            assert (await fakes.ask(f"/admin/requests/{request['id']}/abort", key="root")).status == 200
        assert [(await call.ended()).code for call in calls] == ["aborted", "aborted"]


async def test_shutdown_ends_loads_and_answers_those_who_wait() -> None:
    async with fleet("a", "b", is_open=False) as fakes:
        call = fakes.call(model="a")
        await wait_until_async(lambda: fakes.manager.status("a").waiting_requests)
    await call.ended()
    assert (call.status, call.code) == (503, "shutting_down")


async def test_log_lines_name_their_model(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "foreword")
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        set_up_logging("info", "%(message)s")
        monkeypatch.setattr(app, "TICK_S", 0.01)
        async with fleet("a", "b") as fakes:
            for name in ("a", "b"):
                await fakes.ask(model=name)
            recorders = fakes.manager.recorders()
            for recorder in recorders:
                recorder._log_interval_s = 0.001
            await wait_until_async(lambda: not any(each._interval.has_traffic for each in recorders))
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    lines = capsys.readouterr().err.splitlines()
    for name in ("a", "b"):
        assert any(line.startswith(f"{name}: loaded in") for line in lines)
        assert any(line.startswith(f"{name}: Throughput") for line in lines)
        assert sum(line.startswith(f"{name}: request chatcmpl-") for line in lines) == 1
