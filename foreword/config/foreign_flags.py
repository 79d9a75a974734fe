"""Flags of other servers, and what answers them: a flag of ours, a note, or the reason against it.

The command line, `LLM(...)` and the tables of docs/migrating.md read them from here. Flags whose name and
meaning are ours are not listed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from foreword.config.options import option_fields
from foreword.errors import ConfigError, did_you_mean

__all__ = ["FOREIGN_FLAGS", "ForeignFlag", "find_foreign", "translate_keywords"]

ONE_DEVICE = "a server runs on one device; start one server for each and a proxy in front"
CONTROLLER = "a controller sets the draft length by measured gain"
WITH_MODEL = "the draft model runs where the model runs"
LORA = "use --lora-modules name=path: each adapter is a model of its name"
FORMAT_FOUND = "the format is found by the chat template; see --tool-format and `foreword check`"
NO_TLS = "TLS ends at a proxy in front of the server"
REQUEST_FIELD = "it is a field of each request"
HUB_CACHE = "the variable HF_HOME names the hub's cache"
CHECKPOINT_DECIDES = "config.json decides; edit the checkpoint's file"
DOWNLOAD = "download the file and pass its path, or pass a hub id such as organisation/name:Q4_K_M"
EXACT = "acceptance is always exact"


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag of another server.

    kind      same: taken for `ours`; ignored: taken without effect; refused: an error
    answer    the reason, or what to use instead; for "same", used by commands that lack `ours`
    ours      our flag of the same meaning; with a value if the foreign flag has none ("--log-interval 0")
    num_args  values on the command line, as argparse's nargs
    accepted  the only values of an ignored flag that have no effect; empty: all
    """

    names: tuple[str, ...]
    kind: Literal["same", "ignored", "refused"]
    answer: str = ""
    ours: str = ""
    num_args: int | str = 0
    accepted: tuple[str, ...] = ()

    def note(self, name: str) -> str:
        """One line about a use that is taken; empty where the only accepted value says what we do."""
        if self.kind == "same":
            return f"{name} is {self.ours} here"
        return "" if self.accepted else f"{name} has no effect: {self.answer}"

    def refusal(self, name: str, value: object = None) -> str:
        """One line about a use that is refused."""
        if self.kind == "ignored":
            return f"{name} can only be {' or '.join(self.accepted)}, got {value!r}: {self.answer}"
        return f"{name}: {self.answer or f'{self.ours} is no flag of this command'}"

    def accepts(self, value: object) -> bool:
        """Whether a use with this value is taken."""
        return self.kind == "same" or (
            self.kind == "ignored" and (not self.accepted or str(value).lower() in self.accepted)
        )


def _same(names: str, ours: str, answer: str = "") -> ForeignFlag:
    has_value = " " not in ours and not ours.startswith("--no-") and ours not in SWITCHES
    return ForeignFlag(tuple(names.split()), "same", answer, ours, 1 if has_value else 0)


def _ignored(names: str, answer: str, *accepted: str, num_args: int | str = 0) -> ForeignFlag:
    return ForeignFlag(tuple(names.split()), "ignored", answer, "", num_args or int(bool(accepted)), accepted)


def _refused(names: str, answer: str) -> ForeignFlag:
    return ForeignFlag(tuple(names.split()), "refused", answer, "", "?")


SWITCHES = frozenset(
    "--" + item.name.replace("_", "-") for item in option_fields() if isinstance(item.default, bool)
)

# By server. A flag that several servers have stands with the first.
FOREIGN_FLAGS: Mapping[str, tuple[ForeignFlag, ...]] = MappingProxyType(
    {
        "vLLM": (
            _ignored("--trust-remote-code", "no code of a checkpoint is ever run"),
            _ignored("--enable-prefix-caching", "on by default"),
            _same("--no-enable-prefix-caching", "--no-prefix-caching"),
            _ignored("--enable-chunked-prefill", "prompts are always computed in chunks"),
            _refused("--no-enable-chunked-prefill", "prompts are always computed in chunks"),
            _same("--async-scheduling", "--overlap"),
            _same("--no-async-scheduling --disable-async-output-proc", "--no-overlap"),
            _ignored(
                "--scheduling-policy",
                "requests are ordered by their priority, then by arrival",
                "fcfs",
                "priority",
            ),
            _ignored(
                "--disable-log-requests --no-enable-log-requests", "a request logs one line, never its text"
            ),
            _ignored("--enable-log-requests", "every request logs one line, never its text"),
            _ignored("--enable-log-outputs --enable-log-deltas", "answers are never logged"),
            _ignored("--max-log-len", "prompts are never logged", num_args=1),
            _same("--disable-log-stats", "--log-interval 0"),
            _ignored("--uvicorn-log-level", "uvicorn writes no lines; use --log-level", num_args=1),
            _ignored("--disable-uvicorn-access-log", "off by default; --access-log turns it on"),
            _ignored("--enable-request-id-headers", "X-Request-Id is always sent"),
            _ignored("--enable-prompt-tokens-details", "usage always has the cached tokens"),
            _refused("--enable-force-include-usage", f"{REQUEST_FIELD}: stream_options.include_usage"),
            _refused("--enable-per-request-metrics", f"{REQUEST_FIELD}: metrics"),
            _refused("--return-tokens-as-token-ids", f"{REQUEST_FIELD} of the same name"),
            _refused("--default-chat-template-kwargs", f"{REQUEST_FIELD}: chat_template_kwargs"),
            _refused(
                "--trust-request-chat-template", "requests cannot bring a template; use --chat-template"
            ),
            _ignored("--enable-server-load-tracking", "GET /metrics has the running and waiting requests"),
            _refused("--enable-prompt-embeds", "prompts are texts or token ids"),
            _refused("--watermark-config", "answers are not watermarked"),
            _ignored("--disable-frontend-multiprocessing", "the engine always has its own process"),
            _ignored("--api-server-count", "one process answers HTTP", "1"),
            _ignored("-tp --tensor-parallel-size", ONE_DEVICE, "1"),
            _ignored("-pp --pipeline-parallel-size", ONE_DEVICE, "1"),
            _same("-dp --data-parallel-size", "--replicas"),
            _refused("--enable-expert-parallel", "one device has all experts"),
            _ignored("--distributed-executor-backend", ONE_DEVICE, "mp", "uni"),
            _ignored("--disable-custom-all-reduce", ONE_DEVICE),
            _ignored("--swap-space", "preempted requests are computed again, not swapped", num_args=1),
            _ignored("--preemption-mode", "preempted requests are computed again", "recompute"),
            _ignored("--cpu-offload-gb", "weights lie on one device", "0", "0.0"),
            _refused("--num-gpu-blocks-override", "use --kv-cache-memory, such as 4000tokens"),
            _ignored("--calculate-kv-scales", "every token and head has its own scale"),
            _ignored("--max-seq-len-to-capture", "CUDA graphs hold for every length", num_args=1),
            _ignored(
                "-O --compilation-config",
                "nothing is compiled; --enforce-eager avoids CUDA graphs",
                num_args=1,
            ),
            _ignored("--disable-cascade-attn --use-v2-block-manager", "there is one implementation"),
            _ignored("--num-scheduler-steps", "a step is one forward pass; see --overlap", "1"),
            _ignored("--num-lookahead-slots", "blocks for drafts are reserved in each step", num_args=1),
            _ignored("--max-parallel-loading-workers", "files are mapped and read in order", num_args=1),
            _refused("--tokenizer", "the checkpoint's own tokenizer is used; put another into its directory"),
            _ignored("--tokenizer-mode", "tokenizer.json is used", "auto", "hf"),
            _refused("--skip-tokenizer-init", "the tokenizer is always loaded"),
            _refused(
                "--revision --code-revision --tokenizer-revision",
                "download the revision and pass its directory",
            ),
            _refused("--download-dir", HUB_CACHE),
            _refused("-hft --hf-token", "the variable HF_TOKEN holds the hub's token"),
            _refused("--hf-config-path --rope-scaling --rope-theta", CHECKPOINT_DECIDES),
            _ignored("--hf-overrides", CHECKPOINT_DECIDES, "{}"),
            _ignored("--config-format", "the format is detected", "auto", "hf"),
            _ignored("--model-impl", "there is one implementation", "auto", "vllm"),
            _ignored("--task --runner", "the served model generates and embeds", "auto", "generate", "embed"),
            _ignored("--convert", "the served model generates and embeds", "auto", "none", "embed"),
            _refused("--pooler-config", "the checkpoint's files name the pooling"),
            _ignored("--override-generation-config", f"{REQUEST_FIELD}; see --generation-config", "{}"),
            _ignored("--chat-template-content-format", "the format is detected", "auto", "openai", "string"),
            _ignored("--response-role", "answers have the role assistant", "assistant"),
            _refused("--max-logprobs", "the limit is 20 a token"),
            _ignored("--max-cpu-loras", "adapters are in one memory; see --max-loras", num_args=1),
            _ignored("--lora-dtype", "adapters have the activations' type", "auto"),
            _ignored("--fully-sharded-loras", ONE_DEVICE),
            _refused("--default-mm-loras", "a request's model names its adapter"),
            _ignored("--enable-auto-tool-choice", "the model may always call the tools of a request"),
            _ignored("--tool-call-parser", FORMAT_FOUND, num_args=1),
            _refused("--tool-parser-plugin", "no code of a plugin parses answers; see --tool-format"),
            _refused("--tool-server", "the client runs the tools"),
            _ignored("--reasoning-parser", FORMAT_FOUND, num_args=1),
            _ignored("--enable-reasoning", "reasoning is always separated from the answer"),
            _refused("--reasoning-config", "the format of reasoning is found by the chat template"),
            _refused(
                "--exclude-tools-when-tool-choice-none", "tools stay in the prompt, so that its prefix stays"
            ),
            _ignored(
                "--guided-decoding-backend --structured-outputs-config", "one backend, always on", num_args=1
            ),
            _refused("--limit-mm-per-prompt", "use --max-images N"),
            _refused("--mm-processor-kwargs", "preprocessor_config.json decides"),
            _refused("--mm-processor-cache-gb", "use --image-cache-memory"),
            _refused("--allowed-origins", "use --cors-origins, names joined by commas"),
            _refused("--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-key-file --ssl-cert-file", NO_TLS),
            _refused(
                "--allow-credentials --allowed-methods --allowed-headers", "--cors-origins decides alone"
            ),
            _refused("--middleware --worker-extension-cls", "no code of the command line is run"),
            _refused("--kv-transfer-config", "prefill and decoding run in one engine"),
            _same("--otlp-endpoint", "--otlp-traces-endpoint"),
            _ignored("--collect-detailed-traces", "the phases of every request are traced", num_args=1),
            _refused("--enable-sleep-mode", "end the server to free its memory"),
            _refused("--speculative-model", "use --draft-model MODEL, or --speculate ngram for [ngram]"),
            _same("--ngram-prompt-lookup-max", "--prompt-lookup-max"),
            _same("--ngram-prompt-lookup-min", "--prompt-lookup-min"),
            _ignored("-spec-draft-tp --speculative-draft-tensor-parallel-size", ONE_DEVICE, "1"),
            _ignored("--spec-decoding-acceptance-method", EXACT, "rejection_sampler"),
            _refused("--typical-acceptance-sampler-posterior-threshold", EXACT),
            _refused("--typical-acceptance-sampler-posterior-alpha", EXACT),
            _ignored("--speculative-disable-by-batch-size", CONTROLLER, num_args=1),
            _ignored("--speculative-disable-mqa-scorer", "there is one implementation"),
            _ignored("--speculative-max-model-len", "the draft model's own context applies", num_args=1),
            _refused("--speculative-model-quantization", "--quantization applies to both models"),
            _ignored(
                "--disable-logprobs-during-spec-decoding", "logprobs are the same with speculation", "false"
            ),
        ),
        "llama-server, llama-box": (
            _same("-m", "--model"),
            _same("-hf -hfr --hf-repo", "--model"),
            _refused("-hff --hf-file", "append it to the hub id: organisation/name:FILE.gguf"),
            _refused("-mu --model-url", DOWNLOAD),
            _same("-a --alias", "--served-model-name"),
            _same("--models-dir", "--models"),
            _same("--models-max", "--max-loaded-models"),
            _refused("--models-preset", "use --models FILE.yaml, which has the options of each model"),
            _ignored("--models-autoload", "models are loaded on demand"),
            _refused("--no-models-autoload", "models are loaded on demand"),
            _refused("--sleep-idle-seconds", "use --keep-alive"),
            _refused(
                "-c --ctx-size",
                "use --max-model-len N for the limit of a request, --kv-cache-memory Ntokens for that of all",
            ),
            _same("-np --parallel", "--max-num-seqs"),
            _refused("-b --batch-size -ub --ubatch-size", "use --max-num-batched-tokens N"),
            _ignored("-cb --cont-batching", "always on"),
            _refused("-nocb --no-cont-batching", "requests are always batched"),
            _same("-t", "--threads"),
            _refused("-tb --threads-batch", "use --threads N, for prompts and answers"),
            _ignored("--threads-http", "one process answers HTTP", num_args=1),
            _refused("-C --cpu-mask --cpu-range --cpu-strict --prio --poll", "use --cpus and --threads N"),
            _refused("--numa", "use numactl"),
            _refused(
                "-ngl --gpu-layers --n-gpu-layers", "use --device cuda or --device cpu: all layers or none"
            ),
            _refused("-sm --split-mode -ts --tensor-split", ONE_DEVICE),
            _refused("-mg --main-gpu -dev", "use --device and --gpus"),
            _ignored("-fa --flash-attn", "attention is always fused", "on", "off", "auto", "1", "0"),
            _ignored("--mlock --no-mmap", "weights are packed into memory of their own"),
            _ignored("--no-warmup", "warm-up takes a moment, and measures what a step costs"),
            _ignored("-nr --no-repack", "weights are packed as the processor reads them"),
            _refused("-nkvo --no-kv-offload", "the KV cache is where the model is"),
            _ignored(
                "-ctk --cache-type-k -ctv --cache-type-v",
                "the default is the type of the activations; use --kv-cache-dtype int8",
                "f16",
                "bf16",
            ),
            _ignored(
                "-ctkd --cache-type-k-draft -ctvd --cache-type-v-draft",
                "--kv-cache-dtype is for both",
                num_args=1,
            ),
            _ignored("-kvu --kv-unified", "all requests share one cache in blocks"),
            _ignored("-dt --defrag-thold", "a cache in blocks has no gaps", num_args=1),
            _ignored("--cache-reuse", "blocks of equal prefixes are reused", num_args=1),
            _ignored("-sps --slot-prompt-similarity", "there are no slots", num_args=1),
            _refused("--slot-save-path", "the cache is not saved"),
            _ignored("--no-context-shift", "an answer ends where the context ends"),
            _refused("--context-shift", "an answer ends where the context ends"),
            _same("-md --model-draft", "--draft-model"),
            _same("--draft --draft-n --draft-max", "--num-speculative-tokens"),
            _ignored("--draft-min --draft-n-min --draft-p-min --draft-p-split", CONTROLLER, num_args=1),
            _ignored("-cd --ctx-size-draft", "its cache holds as many tokens as the model's", num_args=1),
            _ignored(
                "-ngld --gpu-layers-draft --n-gpu-layers-draft -devd --device-draft", WITH_MODEL, num_args=1
            ),
            _ignored("-td --threads-draft -tbd --threads-batch-draft", WITH_MODEL, num_args=1),
            _same("--lookup-ngram-min", "--prompt-lookup-min"),
            _ignored(
                "-lcd --lookup-cache-dynamic",
                "finished answers are kept in memory: --suffix-corpus-memory",
                num_args=1,
            ),
            _refused(
                "-lcs --lookup-cache-static",
                "drafts come from requests and finished answers, not from a file",
            ),
            _same("-s", "--seed"),
            _refused("-p --prompt", 'a prompt is a word of its own: `foreword generate "PROMPT"`'),
            _same("-n --predict --n-predict", "--max-tokens", "use --default-max-tokens N"),
            _same("--temp", "--temperature", REQUEST_FIELD),
            _same("--typical", "--typical-p", REQUEST_FIELD),
            _same("--repeat-penalty", "--repetition-penalty", REQUEST_FIELD),
            _refused(
                "--temperature --top-k --top-p --min-p --xtc-probability --xtc-threshold", REQUEST_FIELD
            ),
            _refused("--presence-penalty --frequency-penalty --dry-multiplier --dry-base", REQUEST_FIELD),
            _refused("--dry-allowed-length --max-tokens --typical-p --repetition-penalty", REQUEST_FIELD),
            _refused(
                "--mirostat --mirostat-lr --mirostat-ent",
                "its state would make tokens depend on earlier samples",
            ),
            _refused("--samplers --sampling-seq --sampler-seq", "the order of the filters is fixed"),
            _refused("--grammar --grammar-file -j --json-schema -jf --json-schema-file", REQUEST_FIELD),
            _ignored("--embedding --embeddings --rerank --reranking", "these routes are always served"),
            _ignored(
                "--metrics --slots --no-slots --props", "/metrics is always served, and there are no slots"
            ),
            _ignored("--no-webui", "there is no web page"),
            _refused("--webui --path", "there is no web page"),
            _refused("--api-prefix", "a proxy in front can add a prefix"),
            _refused("-to --timeout", "use --client-timeout or --request-timeout"),
            _ignored("--jinja", "templates are always Jinja"),
            _same("--chat-template-file", "--chat-template"),
            _refused("--no-jinja", "templates are always Jinja"),
            _ignored(
                "--reasoning-format", "reasoning is always separated", "auto", "deepseek", "deepseek-legacy"
            ),
            _ignored("--reasoning-budget", f"{REQUEST_FIELD}: thinking_token_budget", "-1"),
            _refused("--reasoning-budget-message", "the budget closes the reasoning without a message"),
            _refused("--mmproj -mm --mmproj-url", "multimodal models load from Hugging Face checkpoints"),
            _ignored("--no-mmproj", "a GGUF file is text only"),
            _refused("--lora --lora-scaled", LORA),
            _refused("--control-vector --control-vector-scaled", "control vectors are not supported"),
            _refused("--rope-freq-base --rope-freq-scale --yarn-orig-ctx --override-kv", CHECKPOINT_DECIDES),
            _refused(
                "-ot --override-tensor -ncmoe --n-cpu-moe -cmoe --cpu-moe", "all layers are on one device"
            ),
            _refused("--log-disable", "use --log-level error"),
            _refused("--log-file", "redirect stderr"),
            _refused("-v --verbose -lv --verbosity", "use --log-level debug"),
            _ignored("--log-colors --log-prefix --log-timestamps --no-perf", "the log has one format"),
        ),
        "SGLang": (
            _same("--model-path", "--model"),
            _refused("--tokenizer-path", "the checkpoint's own tokenizer is used"),
            _same("--context-length", "--max-model-len"),
            _same("--max-running-requests", "--max-num-seqs"),
            _refused("--max-queued-requests", "use --max-waiting N, which counts running requests too"),
            _refused("--mem-fraction-static", "use --gpu-memory-utilization, a share of the whole memory"),
            _refused(
                "--max-total-tokens",
                "use --kv-cache-memory Ntokens (SGLang's meaning) or --max-model-len N (TGI's meaning)",
            ),
            _refused("--chunked-prefill-size --max-prefill-tokens", "use --max-num-batched-tokens N"),
            _same("--page-size", "--block-size"),
            _same("--random-seed", "--seed"),
            _refused("--lora-paths", LORA),
            _same("--max-loras-per-batch", "--max-loras"),
            _ignored("--max-loaded-loras", "adapters are in one memory; see --max-loras", num_args=1),
            _ignored("--lora-target-modules", "an adapter's files name its targets", num_args="*"),
            _ignored("--lora-backend", "there is one implementation", num_args=1),
            _same("--disable-radix-cache", "--no-prefix-caching"),
            _same("--disable-cuda-graph", "--enforce-eager"),
            _same("--disable-overlap-schedule", "--no-overlap"),
            _ignored("--cuda-graph-max-bs", "graphs are captured up to the rows that pay", num_args=1),
            _ignored("--tp --tp-size --dp --dp-size --pp-size --ep-size --nnodes", ONE_DEVICE, "1"),
            _refused("--dist-init-addr --node-rank", ONE_DEVICE),
            _ignored(
                "--attention-backend --sampling-backend --grammar-backend", "the device decides", num_args=1
            ),
            _ignored(
                "--schedule-policy", "requests are ordered by their priority, then by arrival", "fcfs", "lpm"
            ),
            _ignored("--schedule-conservativeness", "the cache has no over-commitment", num_args=1),
            _ignored("--enable-mixed-chunk --enable-deterministic-inference", "always on"),
            _ignored("--enable-metrics", "/metrics is always served"),
            _ignored("--enable-torch-compile", "nothing is compiled at run time"),
            _ignored("--is-embedding", "the served model generates and embeds"),
            _ignored("--skip-server-warmup", "warm-up takes a moment, and measures what a step costs"),
            _ignored("--stream-interval", "every step is streamed", "1"),
            _refused("--torchao-config", "use --quantization int8 or int4"),
            _refused("--watchdog-timeout", "use --hang-timeout SECONDS"),
            _refused(
                "--speculative-algorithm",
                "use --speculate ngram for NGRAM, or --draft-model MODEL for STANDALONE; "
                "trained heads (EAGLE, MTP) are not supported yet",
            ),
            _same("--speculative-draft-model-path", "--draft-model"),
            _refused(
                "--speculative-num-steps --speculative-num-draft-tokens", "use --num-speculative-tokens N"
            ),
            _ignored("--speculative-eagle-topk", "drafts are chains, not trees", "1"),
            _ignored(
                "--speculative-accept-threshold-single --speculative-accept-threshold-acc", EXACT, "1", "1.0"
            ),
        ),
        "TGI": (
            _same("--model-id", "--model"),
            _refused("--quantize", "use --quantization int8, int4 or fp8"),
            _ignored("--num-shard", ONE_DEVICE, "1"),
            _ignored("--sharded", ONE_DEVICE, "false"),
            _same("--hostname", "--host"),
            _same("--max-concurrent-requests", "--max-waiting"),
            _same("--max-batch-size", "--max-num-seqs"),
            _same("--json-output", "--log-format json"),
            _refused(
                "--max-input-tokens --max-input-length",
                "use --max-model-len N, for prompt and answer together",
            ),
            _refused("--max-batch-prefill-tokens", "use --max-num-batched-tokens N"),
            _refused("--max-batch-total-tokens", "use --kv-cache-memory Ntokens"),
            _ignored("--waiting-served-ratio", "prompts and answers share every step", num_args=1),
            _refused("--cuda-memory-fraction", "use --gpu-memory-utilization X"),
            _refused("--lora-adapters", LORA),
            _refused("--huggingface-hub-cache", HUB_CACHE),
            _refused("--payload-limit", "use --max-body-mb N"),
            _refused("--cors-allow-origin", "use --cors-origins, names joined by commas"),
            _refused("--max-best-of", "the request's field n decides"),
            _ignored("--validation-workers --max-client-batch-size", "there is no such limit", num_args=1),
            _ignored("--enable-prefill-logprobs", "the request decides"),
            _ignored("--usage-stats", "nothing is ever sent", num_args=1),
        ),
    }
)


def find_foreign(name: str) -> tuple[str, ForeignFlag] | None:
    """The server that has a flag of this name, and the flag."""
    for source, flags in FOREIGN_FLAGS.items():
        for flag in flags:
            if name in flag.names:
                return source, flag
    return None


def translate_keywords(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of Config for keyword arguments of `LLM`, those of vLLM's `LLM` included, and notes.

    vLLM's arguments are answered like its flags; a `speculative_config` may be a mapping. Raises ConfigError.
    """
    fields = {item.name: item for item in option_fields()}
    translated: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in options.items():
        if name == "speculative_config" and isinstance(value, Mapping):
            translated[name] = json.dumps(value)
        elif name in fields:
            translated[name] = value
        elif value is not None:
            translated.update(_translate_keyword(name, value, tuple(fields), notes))
    return translated, notes


def _translate_keyword(name: str, value: object, known: Collection[str], notes: list[str]) -> dict[str, Any]:
    """One argument that is no field of Config. False stands for the flag --no-..., or for the default."""
    dashed = name.replace("_", "-")
    found = find_foreign(f"--no-{dashed}" if value is False else f"--{dashed}")
    if found is None and value is False and find_foreign(f"--{dashed}"):
        return {}  # a switch that is off
    if found is None:
        raise ConfigError(f"LLM has no option {name!r}{did_you_mean(name, known)}", name)
    flag = found[1]
    if not flag.accepts(value):
        raise ConfigError(flag.refusal(name, value), name)
    if flag.kind == "ignored":
        notes += filter(None, [flag.note(name)])
        return {}
    ours, _, constant = flag.ours.partition(" ")
    field = re.sub(r"^--(no-)?", "", ours).replace("-", "_")
    if constant:
        return {field: float(constant)}
    return {field: not ours.startswith("--no-") if flag.num_args == 0 else value}
