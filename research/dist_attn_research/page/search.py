"""How well searches find that the page asks for: by words, by vectors, and by both together.

`dist-attn bench page-search FOLDER` lets a service encode the books of `QUESTIONS` in a folder (`moby_dick.txt` …) with
`--model`, and asks `/v1/search`. It prints, for each mode, the mean of one over the rank of the first right passage. A
passage is right if it fits the question's pattern; questions and patterns were written before anything was ranked.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import httpx

from dist_attn_research.service.program import own_service, parser_of

__all__ = ["QUESTIONS", "main", "measure"]

WINDOW = 512
QUESTIONS: dict[str, dict[str, dict[str, str]]] = {
    "its own words": {
        "moby_dick": {
            "the white whale bites off the captain's leg": r"dismasted|reaped away ahab|crunched by|"
            r"devoured, chewed up|(took off|lost) (his|my|that) leg|stove.{0,60}leg",
            "sharing a bed with a harpooneer": r"counterpane|head-peddler|harpooneer.{0,200}\bbed\b|"
            r"\bbed\b.{0,200}harpooneer",
            "gold coin nailed to the mast": r"doubloon|ounce of gold",
            "the sermon about jonah": r"father mapple|jonah",
            "a coffin used as a life buoy": r"coffin.{0,300}life.?buoy|life.?buoy.{0,300}coffin",
            "the cabin boy jumps from the boat and goes mad": r"\bpip\b.{0,400}(jump|overboard|mad\b|idiot|sea)",
            "electric fire burns on the masts in the storm": r"corpusants|corposants|st\. elmo",
            "why the colour white is frightening": r"whiteness",
            "squeezing lumps of sperm with the hands": r"squeez",
            "chowder is served at the inn": r"chowder",
        },
        "jane_eyre": {
            "locked in the red room": r"red-room",
            "the wedding is stopped because he has a wife already": r"impediment|wife now living|insuperable",
            "a mad woman sets fire to his bed": r"tongues of flame|curtains were on fire|smoke rushed|"
            r"burning.{0,80}bed|bed.{0,80}(flame|fire)",
            "a girl dies of consumption at school": r"helen.{0,300}(consumption|dying|dead|decline)|typhus",
            "the rider falls from his horse on the ice": r"sheet of ice|sprain|horse.{0,120}\bice\b",
            "a gipsy tells fortunes": r"gips(y|ies)|gypsy|sibyl",
            "she inherits twenty thousand pounds": r"twenty thousand pounds",
            "the missionary asks her to go to india as his wife": r"(st\. john|missionary).{0,400}india|"
            r"india.{0,400}(st\. john|missionary)",
            "lightning splits the chestnut tree": r"chestnut",
            "he is blind and lost a hand in the fire": r"stone-blind|\bblind\b.{0,200}(hand|cripple|fire)|"
            r"(hand|cripple|fire).{0,200}\bblind\b",
        },
    },
    "other words": {
        "moby_dick": {
            "a tattooed heathen becomes his friend": r"bosom friend|queequeg.{0,200}(friend|tattoo)|"
            r"tattoo.{0,200}queequeg",
            "the first mate argues against revenge": r"starbuck.{0,400}(vengeance|blasphemous|dumb brute)|"
            r"vengeance on a dumb brute",
            "everybody drowns at the end": r"concentric circles|vortex|great shroud of the sea",
            "a lovely dinner of clams and cod": r"chowder",
            "the preacher climbs up a rope": r"pulpit",
            "old commander with an artificial limb": r"ivory leg|bone leg|white leg|ivory stump|dead stump",
            "he throws his tobacco into the ocean": r"\bpipe\b.{0,200}(sea|toss|smok)",
            "the smith forges a new spear baptised in blood": r"(perth|blacksmith).{0,400}(harpoon|barb)|"
            r"ego non baptizo",
            "skulls hoisted on both sides of the vessel": r"locke's head|kant's|right whale's head",
            "perfume from a sick fish": r"ambergris",
        },
    },
}
MODES = ("lexical", "dense", "hybrid")
MOST = 100  # results of a search; a right passage behind them counts as not found


def first_right(texts: Sequence[str], pattern: str) -> float:
    """One over the rank of the first passage that fits a pattern, of passages in their order; 0 where none does."""
    fits = (re.search(pattern, " ".join(text.lower().split())) for text in texts)
    return next((1 / rank for rank, fit in enumerate(fits, 1) if fit), 0.0)


def measure(http: httpx.Client, data: bytes, questions: dict[str, str]) -> dict[str, list[float]]:
    """One over the rank of the first right passage of a text, for each mode and each question."""
    head = {"content-type": "text/plain"}
    job = http.post("/v1/jobs", params={"window": WINDOW}, content=data, headers=head).raise_for_status().json()["id"]
    http.get(f"/v1/jobs/{job}/result").raise_for_status()  # which ends with the job
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for mode in MODES:
        for query, pattern in questions.items():
            asked = {"query": query, "mode": mode, "top_k": MOST, "documents": [{"job_id": job}]}
            results = http.post("/v1/search", json=asked).raise_for_status().json()["results"]
            found[mode].append(first_right([one["text"] for one in results], pattern))
    return found


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0, or 2 when something is missing."""
    parser = parser_of("page-search", __doc__)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    books = sorted({book for kind in QUESTIONS.values() for book in kind})
    missing = [book for book in books if not (given.folder / f"{book}.txt").is_file()]
    if missing:
        print(f"page_search: {given.folder} has no {missing[0]}.txt", file=sys.stderr)
        return 2
    found: dict[str, dict[str, list[float]]] = {kind: {mode: [] for mode in MODES} for kind in QUESTIONS}
    with (
        own_service(given.model, 1) as service,
        httpx.Client(base_url=service.url, timeout=None) as http,
    ):
        for kind, of_books in QUESTIONS.items():
            for book, questions in of_books.items():
                data = (given.folder / f"{book}.txt").read_bytes()
                for mode, ranks in measure(http, data, questions).items():
                    found[kind][mode] += ranks
    means = {kind: {mode: round(fmean(ranks), 3) for mode, ranks in of.items()} for kind, of in found.items()}
    result = json.dumps({"model": given.model, "mean_reciprocal_rank": means}, indent=1)
    print(result)
    given.json.write_text(result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
