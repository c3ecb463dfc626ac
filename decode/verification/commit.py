"""Check 5, commit and end: texts, rebuilt from their rounds."""

from decode.engine.detokenizer import TextStream
from decode.verification.recording import Recorder
from decode.verification.reference import end_of
from decode.verification.verdict import Tally
from specalign.lm.model import Target

TEXT = "naïve 🙂👩‍👩‍👧 日本語 ok"
"""Characters of several tokens."""


def check_texts(target: Target, tally: Tally) -> None:
    """Texts of which characters begin in one token and end in another, to every length and with
    every stop string."""
    tokens = target.text_tokens(TEXT)
    words = {TEXT[i : i + n] for n in (1, 2, 5, 12) for i in range(len(TEXT) - n + 1)}
    every = [(tokens[:n], ()) for n in range(1, len(tokens) + 1)]
    for some, stops in [*every, *((tokens, (word, "never there")) for word in sorted(words))]:
        pieces: list[str] = []
        stream = TextStream(target.detokenize, stops, pieces.append)
        count = next((n for n, token in enumerate(some, 1) if stream.push(token)), len(some))
        found = (count, stream.finish(), "".join(pieces))
        wanted, _, text = end_of(target, some, len(some), "length", (), stops)
        what = f"{found} of {len(some)} tokens of {TEXT!r} with the stop strings {stops}"
        tally.expect("texts token by token", found == (wanted, text, text), what)


def check_commit(recorder: Recorder, target: Target, tally: Tally) -> None:
    """The text of each request, rebuilt from its rounds, and decoded as a whole."""
    for request in recorder.requests:
        asked, out, rounds = request.asked, request.runner.out, request.rounds
        tokens: list[int] = []
        for one in rounds:
            tally.place = one.place
            if one.text != [*asked.prompt, *tokens]:
                tally.find("a round did not start from the committed text")
            path = one.path(one.end.rows[-1])
            if one.end.path != path or one.end.accepted != one.proposal.tokens_K[path].tolist():
                tally.find("a round accepted tokens that are not a path of its drafts")
            tokens += [*one.end.accepted, one.end.following]
        tally.place = {"request": request.number}
        context = target.context_limit if asked.context is None else asked.context
        room = context - len(asked.prompt)
        limit, full = (asked.new, "length") if asked.new <= room else (room, "context")
        eos = target.eos_ids if asked.eos is None else asked.eos
        count, finish, text = end_of(target, tokens, limit, full, eos, asked.stop)
        tally.counts[f"ended by {finish or 'nothing'}"] += 1
        what = f"the text has {len(out.tokens)} tokens, but its rounds produced {count}"
        right = tally.expect("texts", out.tokens == tokens[:count], what)
        if right and (out.finish, out.text) != (finish, text):
            what = f"it should end by {finish!r} with {text[-40:]!r}"
            tally.find(f"the text ends by {out.finish!r} with {out.text[-40:]!r}; {what}")
        if request.pieces is not None and "".join(request.pieces) != text:
            what = f"the text with {text[-40:]!r}"
            tally.find(f"the streamed pieces end with {''.join(request.pieces)[-40:]!r}, {what}")
        after = sum(len(one.text) - len(asked.prompt) >= count for one in rounds)
        # the captured engine sees a stop string a round late
        if after > (finish == "stop" and request.captured):
            tally.find("a round ran after the end of the text")
