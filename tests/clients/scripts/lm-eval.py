import os

from case import MAX_TOKENS, MODEL, PROMPT, STORY, V1, report
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

plain = LocalCompletionsAPI(
    base_url=V1 + "/completions", model=MODEL, tokenizer=os.environ["FOREWORD_CLIENTS_MODEL"], max_length=1024
)
chat = LocalChatCompletion(base_url=V1 + "/chat/completions", model=MODEL)
limits = {"until": [], "max_gen_toks": MAX_TOKENS, "temperature": 0}
# A harness flag (--apply_chat_template) turns a prompt into the text of a conversation.
conversation = chat.apply_chat_template([{"role": "user", "content": PROMPT}])


def ask(kind: str, *arguments: object) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=arguments, idx=0)]


context, continuation = PROMPT.rsplit(" ", 1)
[(loglikelihood, _)] = plain.loglikelihood(ask("loglikelihood", context, " " + continuation))
report(
    text=chat.generate_until(ask("generate_until", conversation, limits))[0],
    completion=plain.generate_until(ask("generate_until", STORY, limits))[0],
    loglikelihood=loglikelihood,
)
