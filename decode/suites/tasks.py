"""Twenty prompts written for this project, five each of kinds that benchmarks of speculative decoding hold beside chat, code and
maths (Spec-Bench, arXiv 2401.07851): translation, summaries, questions, and questions with passages to answer them from."""

from __future__ import annotations

from decode.suites.prompt import own_suite

_HARBOUR = (
    "The harbour of Lindholm was dug in 1871, when the old river mouth had silted up. For forty years it lived on timber. After "
    "the sawmills closed in 1913 the town built a cannery, and herring took the place of planks. The cannery burned down in 1958 "
    "and was not rebuilt, because the shoals had moved north. Today the quays belong to sailing boats, and a museum in the "
    "former customs house shows how planks were sorted by hand. The council plans to dredge the basin again by 2030."
)
_SWIFTS = (
    "Swifts spend almost their whole lives in the air. They eat, drink and sleep on the wing, and land only to breed. A young "
    "swift that leaves the nest may not touch the ground for two or three years. Because their legs are short, they have trouble "
    "taking off from flat ground, so they nest in high holes of cliffs and old buildings. When roofs are repaired these holes "
    "are closed. Nest boxes help, if they hang at least five metres above the ground and have nothing in front of them."
)
_LIBRARY = (
    "Since March the town library lends tools as well as books. Drills, ladders and a sewing machine can be taken home for a "
    "week. The idea came from two readers who had each bought a drill for a single shelf. In the first half year 412 loans were "
    "counted, most of them on Fridays, and three tools came back broken. A volunteer repairs them in the cellar. The library "
    "wants to add camping gear next summer, but has no room for tents yet."
)
_TIDES = (
    "A tidal power station uses the difference between high and low water. At high tide a basin fills through open gates. The "
    "gates close, the sea falls, and the water in the basin flows back through turbines. Output is small around the turn of the "
    "tide, but it can be predicted years ahead, which wind and sun cannot offer. Such stations are expensive to build, and mud "
    "that settles in the basin has to be removed. Few coasts have a range of more than five metres, which is what pays."
)
_BREAD = (
    "Sourdough rises without added yeast. Flour and water are left to stand for some days, until wild yeasts and lactic acid "
    "bacteria have settled in the mixture. A part of it is kept and fed with fresh flour, and the rest goes into the dough. The "
    "acid keeps mould away and makes the crumb firm. A cold dough ferments slowly and tastes sour; a warm one is milder and is "
    "ready sooner. Bread made with rye needs the acid, because rye flour alone does not hold the gas."
)

PROMPTS: dict[str, tuple[str, ...]] = {
    "translation": (
        "Translate from German to English: Der Zug nach Hamburg fällt heute wegen eines Sturms aus. Fahrgäste können ihre Karten "
        "bis Ende der Woche benutzen.",
        "Translate from French to English: Nous avons loué une petite maison au bord du lac. Le matin, le brouillard couvre "
        "l'eau, et on n'entend que les oiseaux.",
        "Translate from Spanish to English: La panadería abre a las seis. Si llega temprano, todavía encontrará pan caliente y "
        "una silla junto a la ventana.",
        "Translate into French: The museum is closed on Mondays. Guided tours begin at ten o'clock and last about an hour.",
        "Translate into German: Please leave your wet shoes at the door. The kitchen is on the left, and the soup is still warm.",
    ),
    "summary": tuple(
        f"Summarise this text in two sentences.\n\n{passage}"
        for passage in (_HARBOUR, _SWIFTS, _LIBRARY, _TIDES, _BREAD)
    ),
    "questions": (
        "Why do leaves change their colour in autumn?",
        "What is the difference between a comet and an asteroid?",
        "How does a vaccine protect the body?",
        "Who wrote Frankenstein, and what is the book about?",
        "Why is the sky dark at night although there are so many stars?",
    ),
    "retrieval": tuple(
        f"Answer the question from the passages.\n\n[1] {first}\n\n[2] {second}\n\nQuestion: {question}"
        for first, second, question in (
            (_HARBOUR, _LIBRARY, "Why was the cannery of Lindholm not built again?"),
            (
                _SWIFTS,
                _BREAD,
                "How high should a nest box for swifts hang, and why do swifts need such boxes?",
            ),
            (_LIBRARY, _TIDES, "What does the library lend besides books, and since when?"),
            (_TIDES, _HARBOUR, "What can tidal power offer that wind and sun cannot?"),
            (_BREAD, _SWIFTS, "Why does bread made with rye need acid?"),
        )
    ),
}

SUITE = own_suite("tasks", "translation, summaries, questions", PROMPTS)
"""Prompts of this project that are no chat, code or maths."""
