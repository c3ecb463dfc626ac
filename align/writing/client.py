"""Continuations by an OpenAI-compatible server that takes and returns token ids (vLLM, SGLang),
with checked replies and one-line errors."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import openai

from align.config.data import API_KEY, DataConfig
from align.writing.outline import TargetInfo
from specalign.common.errors import UserError, nearest
from specalign.common.text import short

Json = dict[str, object]
RETRIES = 40  # of a failing request, at most 8 seconds apart: about five minutes
_LOCAL_HOSTS = {"127.0.0.1", "localhost", "::1"}
_ENGINE_DEFAULTS = {
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0, "repetition_penalty": 1.0,
    "return_token_ids": True, "add_special_tokens": False,
}  # fmt: skip
"""Sent explicitly, because engines take missing values from the model's folder."""


class MismatchError(Exception):
    """A reply whose tokens are uncertain; such rows are counted under the message."""


@dataclass(frozen=True)
class CompletionRequest:
    """A text to continue, how to draw its tokens, and the tokens that end it."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    ends: frozenset[int]


class Server:
    """One model of a server, within one event loop. Raises UserError: an invalid address, API key
    or proxy.

    Attributes:
        url: the server's address without `/v1`.
        model: the name under which it serves the target; set by `connect`.
    """

    def __init__(self, target: TargetInfo, options: DataConfig) -> None:
        assert options.server is not None
        self.target, self.options, self.url = target, options, options.server
        self.model = ""
        secret = os.environ.get(API_KEY, "").strip()
        if not secret.isascii() or not secret.isprintable():
            raise UserError(f"the environment variable {API_KEY} is not a valid API key")
        try:
            use_proxies = urlsplit(self.url).hostname not in _LOCAL_HOSTS
            self._api = openai.AsyncOpenAI(
                base_url=f"{self.url}/v1",
                api_key=secret or "none",
                max_retries=RETRIES,
                timeout=options.reply_seconds,
                http_client=openai.DefaultAsyncHttpxClient(trust_env=use_proxies),
            )
        except Exception as error:  # invalid URLs, proxies and certificates have no common class
            raise UserError(f"cannot connect to {self.url}: {error}") from None

    async def close(self) -> None:
        await self._api.close()

    async def connect(self, probe: CompletionRequest, capacity: int) -> None:
        """Choose the model, which must accept `capacity` tokens, and check by a request of one
        token that it reads and writes the target's tokens. Raises UserError: it does not, or there
        is no such server or model."""
        await self.find_model(capacity, "data.max_prompt_tokens or data.max_answer_tokens")
        try:
            await self.continue_text(replace(probe, max_tokens=1))
        except MismatchError as error:
            raise UserError(
                f"{self.url}: {self.model!r} differs from {self.target.spec!r}, or the "
                f"server does not return token ids, as vLLM and SGLang do ({error})"
            ) from None

    async def find_model(self, capacity: int, keys: str) -> None:
        """Choose the model, which must accept `capacity` tokens; `keys` determine them."""
        model = self.choose_model(await self.list_models())
        self.model = str(model["id"])
        limit = model.get("max_model_len")
        if isinstance(limit, int) and limit < capacity:
            raise UserError(
                f"{self.url}: {self.model!r} has a context of {limit} tokens, but samples can reach "
                f"{capacity}; lower {keys}"
            )

    async def list_models(self) -> list[Json]:
        """The models that the server lists. Raises UserError: no OpenAI-compatible server."""
        models = (await self.send("/models")).get("data")
        listed = models if isinstance(models, list) else []
        if not listed or not all(isinstance(model, dict) and "id" in model for model in listed):
            raise UserError(f"{self.url}/v1/models: lists no models")
        return listed

    def choose_model(self, models: Sequence[Json]) -> Json:
        """The entry of the target: `data.served_model`, or its name without the owner. Raises
        UserError: the server has no such model."""
        served, target = self.options.served_model, self.target.spec
        by_name = {str(model["id"]): model for model in models}
        if served in by_name:
            return by_name[served]
        if served is not None:
            hint = nearest(served, by_name)
            raise UserError(f"data.served_model={served!r}: not served by {self.url}{hint}")
        for name, model in by_name.items():
            if _last_part(target) in (_last_part(name), _last_part(str(model.get("root")))):
                return model
        raise UserError(
            f"{self.url} serves {', '.join(map(repr, by_name))}, not target.name={target!r}; if it "
            f"is the same model under another name: data.served_model={min(by_name)}"
        )

    async def continue_text(self, request: CompletionRequest) -> list[int]:
        """The tokens of a continuation, with the one that ends it unless it was cut at its length.
        Raises MismatchError: the reply contradicts itself; UserError: no usable reply."""
        return self.read(request, await self.send("/completions", self.make_body(request)))

    async def send(self, path: str, body: Json | None = None) -> Json:
        """The JSON object of a reply; completions are retried, as the address is known to be right.
        Raises UserError: no such reply."""
        where = f"{self.url}/v1{path}"
        try:
            if body is None:
                reply = await self._api.with_options(max_retries=0).get(path, cast_to=object)
            else:
                reply = await self._api.post(path, body=body, cast_to=object)
        except openai.APIStatusError as error:
            detail = error.body.get("message") if isinstance(error.body, dict) else None
            key = f"; set {API_KEY} to the server's API key" if error.status_code == 401 else ""
            answer = f"answered {error.status_code} {short(detail or error.response.text, 200)}"
            raise UserError(f"{where}: {answer}{key}") from None
        except (openai.OpenAIError, ValueError, RecursionError) as error:
            reason = short(str(error.__cause__ or error) or type(error).__name__, 200)
            raise UserError(f"{where}: no usable answer ({reason}); is the server up?") from None
        if not isinstance(reply, dict):
            raise UserError(f"{where}: answered {short(reply, 60)}, which is not a JSON object")
        return reply

    def make_body(self, request: CompletionRequest) -> Json:
        return {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "top_p": self.options.top_p,
            "top_k": self.options.top_k or -1,
            "stop_token_ids": sorted(request.ends),
            **_ENGINE_DEFAULTS,
        }

    def read(self, request: CompletionRequest, reply: Json) -> list[int]:
        """A reply's tokens. Raises MismatchError: tokens that are uncertain."""
        choices, usage = reply.get("choices"), reply.get("usage")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict) or choice.get("finish_reason") not in ("stop", "length"):
            raise MismatchError("no finished text")
        counts = usage if isinstance(usage, dict) else {}
        prompt_ids, prompt_count = choice.get("prompt_token_ids"), counts.get("prompt_tokens")
        prompt = list(request.prompt)
        if prompt_ids not in (None, prompt) or prompt_count not in (None, len(prompt)):
            raise MismatchError("prompt tokenized differently")
        ids, size = choice.get("token_ids"), self.target.vocab_size
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
            raise MismatchError("no ids of the target's tokens")
        if counts.get("completion_tokens") not in (None, len(ids)) or len(ids) > request.max_tokens:
            raise MismatchError("number of ids differs from the reply's count")
        tokens = self._cut_at_end(request, choice, ids)
        written = tokens[:-1] if tokens and tokens[-1] in request.ends else tokens
        decoded = str(self.target.tokenizer.decode(written, skip_special_tokens=True))
        if not _comparable(str(choice.get("text"))).startswith(_comparable(decoded)):
            raise MismatchError("ids and text disagree")
        return tokens

    def _cut_at_end(self, request: CompletionRequest, choice: Json, ids: list[int]) -> list[int]:
        """The tokens up to the first end. An end that the reply leaves out is appended."""
        for place, token in enumerate(ids):
            if token in request.ends:
                return ids[: place + 1]
        reason = choice["finish_reason"]
        is_cut = reason == "length"
        if is_cut != (len(ids) >= request.max_tokens):  # the engine's own limit, or a wrong reason
            counts = f"{len(ids)} of {request.max_tokens} tokens"
            raise MismatchError(f"{counts} and finish_reason {reason}")
        if is_cut:
            return ids
        stop = choice.get("stop_reason", choice.get("matched_stop"))
        ends = (stop, self.target.tokenizer.eos_token_id)
        known = (end for end in ends if type(end) is int and end in request.ends)
        return [*ids, next(known, min(request.ends))]


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def _comparable(text: str) -> str:
    """Without what engines decode differently: incomplete characters and outer white space."""
    return text.replace("\ufffd", "").strip()
