"""TensorRT-LLM's disaggregation: a context server computes, and answers with what a generation server needs.

``disaggregated_params`` of a request say which half it is. The context server's choice carries them back, with its first
token and an opaque state that says where the KV is; the caller sends them on with another request_type. KV is kept for
a lease. (tensorrt_llm/serve/openai_protocol.py and openai_disagg_service.py, as of 1.4.)
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import replace
from itertools import count

import msgspec

from load_tests.engine.disagg.connector import JSON
from load_tests.engine.disagg.pull import PullConnector, PullLink, Source
from load_tests.engine.disagg.rooms import first_token
from load_tests.engine.disagg.side import SideError, connect
from load_tests.engine.disagg.traffic import Traffic
from load_tests.engine.driver import Job
from load_tests.engine.errors import ApiError
from load_tests.engine.faults import Faults
from load_tests.engine.options import EngineOptions
from load_tests.engine.rank import Rank
from load_tests.engine.replies import Reply
from load_tests.engine.work import Work

CONTEXT, GENERATION = "context_only", "generation_only"
HALVES = (CONTEXT, GENERATION, "context_and_generation")


class State(Source):
    """What an opaque state says. Raises ApiError 400 for one that is none."""

    def __init__(self, encoded: object) -> None:
        try:
            told = msgspec.json.decode(b64decode(str(encoded), validate=True))
            self.host, self.port, self.id = str(told["host"]), int(told["port"]), str(told["id"])
        except (ValueError, KeyError, TypeError):
            raise ApiError(400, "encoded_opaque_state cannot be read", kind="BadRequestError") from None


class TransceiverConnector(PullConnector):
    """Kept KV is named by the context request's id."""

    name = "transceiver"

    def __init__(self, options: EngineOptions, faults: Faults, traffic: Traffic, port: int) -> None:
        super().__init__(options, faults, traffic, port)
        self._ids = count(1)

    def params(self, body: JSON) -> JSON | None:
        given = body.get("disaggregated_params")
        if given is None:
            return None
        if not isinstance(given, dict) or given.get("request_type") not in HALVES:
            raise ApiError(400, f"disaggregated_params.request_type must be one of {', '.join(HALVES)}")
        return given

    def attach(self, job: Job, name: str, body: JSON, rank: Rank) -> None:
        super().attach(job, name, body, rank)
        given = self.params(body)
        if given is None or given["request_type"] != CONTEXT:
            return
        for index, work in enumerate(job.works):
            job.replies[index] = context_reply(job.replies[index])
            work.planned = job.replies[index].tokens

    def source_of(self, params: JSON) -> Source | None:
        return State(params.get("encoded_opaque_state")) if params["request_type"] == GENERATION else None

    def reported(self, params: JSON) -> int | None:
        usage = params.get("ctx_usage")
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        hit = details.get("cached_tokens") if isinstance(details, dict) else None
        return hit if params["request_type"] == GENERATION and isinstance(hit, int) else None

    def offered(self, params: JSON, source: Source, tokens: int, hit: int) -> int:
        return tokens

    def keep(self, link: PullLink, work: Work) -> bool:
        job, index = work.owner
        if link.params["request_type"] != CONTEXT or job.reason(index) not in ("length", "not_finished"):
            return False
        number = next(self._ids)
        state = {"host": self.options.host, "port": self.port, "id": link.name}
        work.params = {
            "request_type": CONTEXT,
            "first_gen_tokens": list(job.replies[index].tokens),
            "first_gen_log_probs": None,
            "ctx_request_id": number,
            "encoded_opaque_state": b64encode(msgspec.json.encode(state)).decode(),
            "draft_tokens": None,
            "disagg_request_id": link.params.get("disagg_request_id"),
            "ctx_dp_rank": link.rank.number,
            "ctx_info_endpoint": f"tcp://{self.options.host}:{self.port}",
            "schedule_style": link.params.get("schedule_style", 0),
            "ctx_usage": None,
        }
        if self.forgotten():
            return False
        self.pins.keep(link.name, work, link.rank.driver, self.options.lease)
        return True

    async def pull(self, source: Source, work: Work, start: int, end: int) -> list[int]:
        assert isinstance(source, State)
        async with connect(source.host, source.port) as talk:
            seconds = self.seconds(end - start)
            answer = await talk.ask("read", id=source.id, start=start, end=end, seconds=seconds)
        return [int(token) for token in answer["tokens"]]

    async def notify(self, source: Source) -> None:
        assert isinstance(source, State)
        if self.note_lost():
            return
        try:
            async with connect(source.host, source.port) as talk:
                await talk.ask("done", id=source.id)
        except SideError:
            self.traffic.lost_notes += 1

    async def answer(self, question: JSON) -> JSON:
        verb = question.get("verb")
        if verb == "read":
            span = question["start"], question["end"], question["seconds"]
            return {"tokens": await self.give(question["id"], *span)}
        if verb == "done":
            self.traffic.late_notes += not self.pins.release(question["id"])
            return {}
        raise SideError(f"unknown verb {verb!r}")


def context_reply(reply: Reply) -> Reply:
    """One token; what would have gone on is not finished."""
    first = first_token(reply)
    again = reply.again
    cut = first.finish == "length" and len(reply.tokens) > 1
    return replace(
        first,
        finish="not_finished" if cut else first.finish,
        again=None if again is None else lambda seen: context_reply(again(seen)),
    )
