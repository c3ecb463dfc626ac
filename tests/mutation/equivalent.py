"""Mutants that no test can kill, and why."""

_MATRIX = "the tensor has two dimensions: 1 is the last"

EQUIVALENT: dict[str, str] = {
    "decode/engine/engine.py Engine._round: top2 = penalised(logits_MV, sampling, before).topk(2, dim=-1).values → "
    "top2 = penalised(logits_MV, sampling, before).topk(2, dim=(1)).values": _MATRIX,
    "decode/drafters/diffusion.py DiffusionDrafts._next: rank_R = -logits_RV.log_softmax(-1).amax(-1) → "
    "rank_R = -logits_RV.log_softmax(-1).amax((1))": _MATRIX,
    'align/losses/divergence_gradients.py _values: values["forward_kl"] = (p_U * log_p_U).sum(-1)[where] - (p * log_q).sum(-1) → '
    'values["forward_kl"] = (p_U * log_p_U).sum((1))[where] - (p * log_q).sum(-1)': _MATRIX,
    "align/losses/divergence_gradients.py Rows.forward: log_z = log_q.logsumexp(-1, keepdim=True) → "
    "log_z = log_q.logsumexp((1), keepdim=True)": _MATRIX,
    "decode/speculation/rules.py _inflation: over_BN = 1 - (1 - beta_BN) ** siblings_BN > middle_BN * beta_BN → "
    "over_BN = 1 - (1 - beta_BN) ** siblings_BN >= middle_BN * beta_BN": "equal only at ρ itself, and at β = 0, where ρ has no effect",
    "decode/speculation/tree_drafts.py tree_from_marginals: rows = list(zip(top.values.tolist(), top.indices.tolist(), strict=True)) → "
    "rows = list(zip(top.values.tolist(), top.indices.tolist(), strict=False))": "topk gives as many values as indices",
    "decode/engine/detokenizer.py TextStream._cut: start = max(0, len(self.text) - self.longest + 1) → "
    "start = max(0, len(self.text) - self.longest - 1)": "looks again at text in which no stop string ended before",
    "decode/engine/detokenizer.py TextStream._maybe_stop: lengths = range(min(self.longest - 1, len(self.text)), 0, -1) → "
    "lengths = range(min((self.longest), len(self.text)), 0, -1)": "a whole stop string is cut off before this is asked",
    "decode/drafters/controllers.py CostAware.__init__: def __init__(self, keep: float = 0.97, prior: float = 2.0, tries: int = 3) -> "
    "None: → def __init__(self, keep: float = 0.485, prior: float = 2.0, tries: int = 3) -> None:": "how fast rounds are forgotten "
    "by default is a choice; what is done with it is tested",
    "decode/drafters/retrieval.py RetrievalDrafter.__init__: draft_tokens: int = 8, → draft_tokens: int = 9,": "a default length is a choice",
    "decode/drafters/diffuspec_search.py NgramModel.log_probs: for n in range(min(self.order - 1, len(context)) + 1): → "
    "for n in range(min(self.order + 1, len(context)) + 1):": "contexts that long were never counted, and the loop ends there",
    "decode/speculation/rules.py _sound: return torch.where(tested_BN[..., None], q_BNV, 0.0) → "
    "return torch.where(tested_BN[..., None], q_BNV, 1.0)": "p − 1 leaves zeros, which stand for p, as all of p does",
    "decode/speculation/tree.py visits: children: list[list[int]] = [[] for _ in range(len(parents) + 1)] → "
    "children: list[list[int]] = [[] for _ in range(len(parents) + 2)]": "a list more than there are nodes: none looks at it",
    "decode/speculation/rules.py k_seq: share_BN = torch.where(beta_BN > 0, (1 - (1 - beta_BN) ** siblings_BN) / beta_BN, 0.0) → "
    "share_BN = torch.where(beta_BN >= 0, (1 - (1 - beta_BN) ** siblings_BN) / beta_BN, 0.0)": "at β = 0 the rest becomes NaN, and `or_p` takes p, which is what 0 leaves",
    "decode/speculation/rules.py or_p: return torch.where(weights_BV.sum(-1, keepdim=True) > 0, weights_BV, p_BV) → "
    "return torch.where(weights_BV.sum((1), keepdim=True) > 0, weights_BV, p_BV)": _MATRIX,
    "decode/speculation/processors.py History.__init__: self.min_length_mask_V = marked((*sampling.banned, *eos_ids)) if self.min_new_tokens else None → "
    "self.min_length_mask_V = (marked((*sampling.banned, *eos_ids)))": "without a minimum length `_barred` returns before it looks at the mask",
    "align/losses/divergence_gradients.py _slope_of_logits: total = forward * p_U.sum(-1, keepdim=True)[where] - label → "
    "total = forward * p_U.sum((1), keepdim=True)[where] - label": _MATRIX,
    "align/losses/divergence_gradients.py _slope_of_logits: return slope if work.draft_temperature == 1.0 else slope.div_(work.draft_temperature) → "
    "return (slope.div_(work.draft_temperature))": "dividing by 1 changes nothing",
    "decode/engine/engine.py _begin: for engine, outcome in zip(engines, verify_rounds(rounds), strict=True): → "
    "for engine, outcome in zip(engines, verify_rounds(rounds), strict=False):": "a round for each request, an outcome for each round",
    "decode/engine/processed.py ProcessedEngine._commit: for kept, rows in zip(self.kept, self.rows, strict=True): → "
    "for kept, rows in zip(self.kept, self.rows, strict=False):": "both are pairs: raw and processed",
    "decode/engine/detokenizer.py TextStream._cut: start = max(0, len(self.text) - self.longest + 1) → "
    "start = max(0, (len(self.text) - self.longest))": "looks again at text in which no stop string ended before",
    "decode/drafters/diffuspec_search.py columns: likeliest = q_KV[:, ids].double().max(-1) → "
    "likeliest = q_KV[:, ids].double().max((1))": _MATRIX,
    "decode/drafters/diffuspec_search.py columns: top = q_KV.double().topk(min(most, q_KV.shape[1]), dim=-1) → "
    "top = q_KV.double().topk(min(most, q_KV.shape[1]), dim=(1))": _MATRIX,
    "decode/drafters/diffuspec.py DiffuSpecSession._q: return probs(logits_KV, sampling, before, overwrite=True) → "
    "return probs(logits_KV, sampling, before, overwrite=False)": "the same numbers in other memory",
    "decode/drafters/d2sd.py D2SDSession.propose: draft_1J = torch.tensor([[self.request.tokens[-1]] + [0] * k], device=self.request.target.device) → "
    "draft_1J = torch.tensor([[self.request.tokens[-1]] + [1] * k], device=self.request.target.device)": "whatever stands there is masked until it is drafted",
    "align/losses/objective.py first_error: wrong = (match < 0.5) & valid → "
    "wrong = (match < 0.25) & valid": "match is 0 or 1",
    "align/losses/divergence_gradients.py _logits: if z_Rr is not None and basis_rV is not None: → "
    "if z_Rr is not None or basis_rV is not None:": "a drafter has both factors or neither",
    "decode/speculation/tree.py : MOST_NODES = 512 → MOST_NODES = 513": "the bound is a choice",
    "align/losses/target_places.py TargetPlaces: temperature: float = 1.0 → "
    "temperature: float = 0.5": "whatever makes places gives their temperature",
    "decode/speculation/settings.py : MIN_TEMPERATURE = 1e-3 → "
    "MIN_TEMPERATURE = 0.0005": "the bound is a choice",
    "decode/speculation/rules.py traversal: for step in zip_longest(*(visits(x) for x in drafts.parents), fillvalue=(0, None)): → "
    "for step in zip_longest(*(visits(x) for x in drafts.parents), fillvalue=(1, None)):": "what has ended is neither reached nor tested, and a batch that branches has two tokens",
    "decode/engine/engine.py _run_to_the_end: rounds = [engine.to_verify(output) for engine, output in zip(running, outputs, strict=True)] → "
    "rounds = [engine.to_verify(output) for engine, output in zip(running, outputs, strict=False)]": "an output for each request",
    "decode/engine/engine.py _forward_together: return running[0].target.forward_together( → "
    "return running[1].target.forward_together(": "the requests share one target, and there are two",
    "decode/engine/output.py Generation.nodes: pairs = zip(self.drafted, self.trees, strict=True) → "
    "pairs = zip(self.drafted, self.trees, strict=False)": "both have a number for each call",
    "decode/engine/processed.py ProcessedEngine._round: for text, row in zip(texts, logits_MV.float(), strict=True) → "
    "for text, row in zip(texts, logits_MV.float(), strict=False)": "a text for each row",
    "decode/drafters/diffusion.py DiffusionSession.before: return self.request.history.ahead(first, last - first + 1).rows(at - first) → "
    "return self.request.history.ahead(first, last + first + 1).rows(at - first)": "more positions than are picked",
    "decode/drafters/autoregressive.py : _READ_AT_ONCE = 2048 → "
    "_READ_AT_ONCE = 2049": "how much is read at once is a choice",
    "decode/drafters/diffuspec_search.py columns: before_KM = top.values.cumsum(-1).roll(1, -1) → "
    "before_KM = top.values.cumsum((1)).roll(1, -1)": _MATRIX,
    "decode/engine/compiled.py compiled: for lengths in ((WIDE + 8, WIDE + 6, 1, 1), (5, 3, 1, 1)): → "
    "for lengths in ((WIDE + 8, WIDE + 7, 1, 1), (5, 3, 1, 1)):": "any width that counts as wide",
    "decode/speculation/processors.py History._barred: if self.min_length_mask_V is None or self.count + min(depth) >= self.min_new_tokens: → "
    "if self.min_length_mask_V is None or self.count + min(depth) > self.min_new_tokens:": "at the length itself no row is barred, whether by one mask or by none",
    "decode/engine/compiled.py compiled: for lengths in ((WIDE + 8, WIDE + 6, 1, 1), (5, 3, 1, 1)): → "
    "for lengths in ((WIDE - 8, WIDE + 6, 1, 1), (5, 3, 1, 1)):": "a long first prompt takes the program of a long later call: else the test would see one compiled anew",
}
"""By name, as `python -m tests.mutation` prints it."""
