"""Reads step-by-step texts and works out what is true of them, knowing nothing of how they were made.

Each sentence is a pattern written out by hand, with what it does: state a value, claim a derived one, say one
again, derive the last one, answer.
"""

import calendar
import re
from typing import NamedTuple

DAYS = [name.lower() for name in calendar.day_name]
MONTHS = [name.lower() for name in calendar.month_name[1:]]
ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
)
PLACES = ORDINALS.split()
REMARK = (
    "(?: (?:today|here|indeed|surely|gladly|perhaps|quietly|oddly|briefly|softly|lately|calmly|"
    "(?P<M>fine|conflict)))?"
)

LETTER = {"N": "[a-z]", "V": r"\d+|[a-z]{2,}"}
WORD = {"N": "[a-z]+", "V": "[a-z]+"}

# Sign, verb, pattern. N is the thing that is told of, F the one it comes from, V a value, K a number.
SENTENCES = {
    "arithmetic": """
        0 state N is V | let N = V | V coins lie in N | jar N holds V | N gets V coins
        + claim N is F plus K so N is V | N holds K more than F which makes V coins
        + claim add K to F and N holds V coins
        - claim let N = F - K = V | take K from jar F and jar N gets V
        0 again N is still V | again N = V | V coins still lie in N | jar N still holds V | N still gets V coins
        + next N is F plus K | let N = F + K | add K to jar F and fill jar N | fill N from F plus K
        - next N holds K less than F
        0 answer so N is V | then N = V | coins in N : V | jar N holds V | then N holds V
        """,
    "variables": """
        0 state set N to V | N = V | V is stored in N | cell N shows V | N shows V
        0 claim copy F into N so N is V | N = F = V | N reads F and returns V
        0 claim cell N follows cell F which makes it V | N follows F so N shows V
        0 again N is still V | again N = V | V is still stored in N | cell N still shows V | N still shows V
        0 next copy F into N | N = F | N reads F | cell N follows cell F | set N to F
        0 answer so N is V | then N = V | N returns V | cell N shows V | then N is V
        """,
    "entities": """
        0 state N wears V hat and V coat | N has V boat and V house | the door of N is V and the roof V
        0 state N owns V cup and V bowl | N owns V cup and V coat | the boat of N is V and the cup V
        0 claim N borrows the coat of F so the coat of N is V | N paints a boat like F and now has V boat
        0 claim N copies the door of F and gets V door | N wins the bowl of F which is V
        0 claim N wins the coat of F which is V | N gets the boat of F and so owns V boat
        0 again the coat of N is still V | N still has V boat | again the door of N is V
        0 again N still owns V bowl | N still owns V boat
        0 next N borrows the coat of F | N paints a boat like F | N copies the door of F
        0 next N wins the bowl of F | N gets the boat of F
        0 answer so the coat of N is V | now the boat of N is V | the door of N is V
        0 answer so the bowl of N is V | now the coat of N is V | the boat of N is V
        """,
    "calendar": """
        0 state the N is on V | the N starts in V | the N comes V | V is the day of the N | V means the N starts
        + claim the N is K days after the F so the N is on V | the N starts K months after the F which means V
        + claim the N comes K places behind the F and so comes V
        + claim the N comes K months after the F and so in V
        - claim the N is K days before the F which means V
        0 again the N is still on V | again the N starts in V | the N still comes V | the day of the N is V
        0 again still V means the N starts
        + next the N is K days after the F | the N comes K months after the F
        - next the N starts K months before the F | the N comes K places ahead of the F
        0 answer so the N is on V | then the N starts in V | so the N comes V | the day of the N is V
        0 answer the N comes in V
        """,
}
OF_COATS = ("hat", "cup", "house", "roof")
"""What else a statement speaks of: its colour is not the one that claims are about."""


class Reading(NamedTuple):
    known: dict[str, object]
    answer: str
    verdict: str
    distances: list[int]
    """For each claim, the sentences back to the statement of what it comes from."""


def compiled(family):
    names = LETTER if family in ("arithmetic", "variables") else WORD
    for line in SENTENCES[family].strip().splitlines():
        sign, verb, rest = line.strip().split(" ", 2)
        for sentence in rest.split(" | "):
            seen, words = set(), []
            for word in sentence.strip().split():
                kind = {"F": names["N"], "K": r"\d+"}.get(word, names.get(word))
                if kind is None:
                    words.append(re.escape(word))
                elif word in seen and word != "V":
                    words.append(f"(?P={word})")
                else:
                    label = word if word not in seen else f"{word}{len(words)}"
                    words.append(f"(?P<{label}>{kind})")
                    seen.add(word)
            yield re.compile(" ".join(words) + REMARK), {"0": 0, "+": 1, "-": -1}[sign], verb, sentence


TABLE = {family: list(compiled(family)) for family in SENTENCES}


def moved(value, offset):
    if value.isdigit():
        return str(int(value) + offset)
    for cycle in (DAYS, MONTHS):
        if value in cycle:
            return cycle[(cycle.index(value) + offset) % len(cycle)]
    return PLACES[PLACES.index(value) + offset] if value in PLACES else value


def the_value(match, sentence):
    """The value that matters: the only one, or not that of the other attribute."""
    values = [match[label] for label in match.groupdict() if label.startswith("V")]
    if len(values) == 1:
        return values[0]
    words = sentence.split()
    places = [place for place, word in enumerate(words) if word == "V"]
    near = [{words[place - 1], words[(place + 1) % len(words)]} for place in places]
    (value,) = (one for one, beside in zip(values, near, strict=True) if not beside & set(OF_COATS))
    return value


def understood(family, sentence, *verbs):
    """The first pattern with one of these verbs that a sentence fits, or an error."""
    for pattern, sign, verb, written in TABLE[family]:
        match = pattern.fullmatch(sentence) if verb in verbs else None
        if match and not (verb == "state" and ends_in_a_remark(sentence)):
            return match, sign, verb, written
    raise AssertionError(f"no pattern for {sentence!r}")


def read(family, text):
    """Works a text out; a sentence that no pattern knows is an error, and so is a wrong answer or recap."""
    story, _, end = text.removesuffix(" .").partition(" . check ")
    verdict, answer, *rest = end.split(" . ")
    known, told, distances, conflict = {}, {}, [], False
    for place, step in enumerate(story.split(" . ")):
        match, sign, verb, written = understood(family, step, "state", "claim", "again", "next")
        name = match["N"]
        if verb == "state":
            known[name], told[name] = the_value(match, written), place
            continue
        source = name if verb == "again" else match["F"]
        true = moved(known[source], sign * int(match["K"]) if "K" in match.groupdict() else 0)
        if verb != "next":
            conflict |= match["V"] != true
            assert match["M"] in (None, "fine" if match["V"] == true else "conflict"), text
            distances.append(place - told[source])
        if verb != "again":
            known[name], told[name] = true, told[source]
    answered, *_ = understood(family, answer, "answer")
    assert known[answered["N"]] == answered["V"], text
    for sentence in rest:
        fact = FACT.fullmatch(sentence)
        if fact:
            check_fact(fact)
        else:
            check_recap(family, sentence, known)
    right = "conflict" if conflict else "fine"
    assert verdict in ("unsaid", right), text
    return Reading(known, answered["V"], right, distances)


def check_recap(family, sentence, known):
    said, verdict, truth = re.fullmatch(r"(.*?)(?: (fine|conflict)(?: (\w+))?)?", sentence).groups()
    again, *_ = understood(family, said, "again")
    true = known[again["N"]]
    wanted = (("fine", None), (None, None)) if again["V"] == true else (("conflict", true),)
    assert (verdict, truth) in wanted, sentence


FACT = re.compile(
    r"(?P<origin>\w+) (?P<way>plus|-) (?P<k>\d+) is (?P<reached>\w+)"
    r"|(?P<k2>\d+) \w+ (?P<way2>after|before|behind|ahead of) (?P<origin2>\w+) is (?P<reached2>\w+)"
)


def check_fact(fact):
    origin, way, k, reached = (fact[name] or fact[name + "2"] for name in ("origin", "way", "k", "reached"))
    sign = 1 if way in ("plus", "after", "behind") else -1
    assert moved(origin, sign * int(k)) == reached, fact[0]


def read_list(family, text):
    """Works a text out that states values of things and says some again, perhaps graded.

    Returns what it states, and in a row the words that follow from what stands before.
    """
    known, determined = {}, []
    for sentence in text.removesuffix(" .").split(" . "):
        said, verdict, true = re.fullmatch(r"(.*?)(?: (fine|conflict))?(?: (\w+))?", sentence).groups()
        if verdict is None:
            said = sentence
        if len(words := said.split()) == 2:
            name, value, is_again = *words, words[0] in known
        else:
            match, _, verb, written = understood(family, said, "state", "again")
            is_again = verb == "again" or match["N"] in known
            match = understood(family, said, "again")[0] if is_again else match
            name, value = match["N"], match["V"] if is_again else the_value(match, written)
        if not is_again:
            assert not determined, sentence
            known[name] = value
        elif verdict is None:
            assert value == known[name], sentence
            determined.append(value)
        else:
            assert verdict == ("fine" if value == known[name] else "conflict"), sentence
            assert true == (None if verdict == "fine" else known[name]), sentence
            determined += [verdict] if verdict == "fine" else [verdict, true]
    return known, determined


def ends_in_a_remark(sentence):
    return re.search(REMARK.removesuffix("?") + "$", sentence) is not None
