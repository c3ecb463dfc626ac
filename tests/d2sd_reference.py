"""D²SD by its definition: one block and one position at a time, with none of its session's code."""

import torch
from torch import Tensor

from decode.proposers.base import Request
from decode.proposers.d2sd import D2SDSession, boundary_scores
from decode.speculation.sampling import probs
from specalign.models.block import BlockDrafter
from specalign.models.block_session import BlockSession


def read(
    request: Request, net: BlockDrafter, shown: list[int]
) -> tuple[BlockSession, Tensor, Tensor]:
    """A session of its own over the request's text; the hidden states (K, D) of a block that shows these drafts; the tokens that
    the network can propose."""
    target, text, size = request.target, request.tokens, net.config.rows
    cache = target.new_cache(1, 40)
    session = BlockSession(net, cache, 40)
    output = target.forward(torch.tensor([text[:-1]]), cache=cache, taps=session.taps)
    session.observe(output.hidden_BLD, output.taps_BLFD, len(text) - 1)
    ids = torch.arange(target.vocab_size) if net.draft_vocab is None else net.draft_vocab
    block = ([text[-1], *shown] + [net.config.mask_token_id] * size)[:size]
    return session, session.draft_hidden_of_blocks(torch.tensor([block]))[0], ids


def by_definition(drafts: D2SDSession, k: int) -> tuple[set[tuple[int, ...]], list[int]]:
    """Every beginning of every draft, one block and one position at a time; and the boundaries."""
    request, drafter = drafts.request, drafts.proposer
    text, sampling, heat = request.tokens, request.sampling, request.sampling.temperature or 1.0

    def write(net: BlockDrafter, draft: list[int]) -> list[float]:
        session, hidden_KD, ids = read(request, net, draft)
        confidences = []
        for j in range(len(draft), k):
            logits = net.logits(hidden_KD[j])
            inputs = session.bias_inputs(hidden_KD[j])
            if inputs is not None:
                logits = logits + session.bias(inputs, torch.tensor([text[-1], *draft][-1]))
            if sampling.repetition_penalty != 1:
                seen = torch.isin(ids, torch.tensor(text))
                penalty = sampling.repetition_penalty
                logits = torch.where(
                    seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits
                )
            q = (logits / heat).softmax(-1)
            confidences.append(float(q.max()))
            score = logits
            if request.noise is not None:
                score = q.double().log() + request.noise(len(text) + j)[ids]
            draft.append(int(ids[score.argmax()]))
        return confidences

    main: list[int] = []
    scores = boundary_scores(torch.tensor(write(drafter.first, main)))
    allowed = range(k)
    kept = sorted(sorted(allowed, key=lambda i: -float(scores[i]))[: drafter.boundaries])
    branches = [main[:i] for i in kept]
    for branch in branches:
        write(drafter.second, branch)
    return {tuple(x[:n]) for x in [main, *branches] for n in range(1, k + 1)}, kept


def rows_by_definition(
    drafts: D2SDSession, net: BlockDrafter, shown: list[int], draft: list[int]
) -> Tensor:
    """What each token of a draft is drawn from, (K, V), the network seeing the `shown` ones in its block."""
    request, target, text = drafts.request, drafts.request.target, drafts.request.tokens
    session, hidden_KD, ids = read(request, net, shown)
    rows = []
    for j in range(len(draft)):
        logits = net.logits(hidden_KD[j])
        inputs = session.bias_inputs(hidden_KD[j])
        if inputs is not None:
            logits = logits + session.bias(inputs, torch.tensor([text[-1], *draft][j]))
        row = torch.zeros(target.vocab_size)
        before = request.history.ahead(j, 1).columns(ids)
        row[ids] = probs(logits[None], request.sampling, before)[0]
        rows.append(row)
    return torch.stack(rows)
