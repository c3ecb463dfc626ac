"""CNN/DailyMail (arXiv 1704.04368): summaries of news, as SpecDiff measures (arXiv 2408.05636): 1,024
new tokens at temperature 1. Base models continue `TL;DR:` (Radford et al., 2019)."""

from specalign.suites.prompt import Place, Prompt, Row, Suite, find_text


def read_cnn_dm(row: Row, number: int) -> Prompt:
    article = find_text(row, "article")
    key = f"cnn_dm-{row.get('id', number)}"
    return Prompt(key, f"{article}\nTL;DR:", "news", row.get("highlights"), raw=True)


PLACE = Place("abisee/cnn_dailymail", "3.0.0", revision="96df5e686bee6baa90b8bee7c28b81fa3fa6223d")
SUITE = Suite(
    "cnn_dm",
    "CNN/DailyMail",
    "summarization",
    read_cnn_dm,
    PLACE,
    metric="ROUGE-L",
    temperature=1.0,
)
