"""Mathematics in LaTeX, compared by the math-verify library (extra `math`): ``\\frac12`` is ``0.5``.

The last ``\\boxed{...}`` is read, or what math-verify takes for the answer at the end. What could make a computer
algebra system work for ever (towers of powers, factorials, endless digits) is refused before it gets there: 0.0.
"""

import re
from typing import Any

TAIL = 1_000
"""Characters of the response that are read, from its end."""
SECONDS = 3
"""For reading, and for comparing."""

_ENDLESS = re.compile(
    r"[0-9]{31}"  # digits
    r"|(?:\^|\*\*)[^+\-=,;$]*(?:\^|\*\*)"  # a power of a power
    r"|(?:\^|\*\*)\s*[{(]*\s*-?\s*[0-9]{4}"  # a large one
    r"|[0-9]{4}\s*[})]*\s*!|!\s*[})]*\s*!"  # factorials
    r"|(?:[{(\[]\s*){33}"  # depth
)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1.0 or 0.0."""
    from math_verify import parse, verify

    truth = parse(ground_truth if "$" in ground_truth or "\\boxed" in ground_truth else f"${ground_truth}$")
    if not truth:
        raise ValueError(f"math-verify does not understand the ground truth {ground_truth!r}")
    answer = boxed(solution_str[-TAIL:]) or solution_str[-TAIL:]
    if _ENDLESS.search(answer) or (not answer.isprintable() and "\x00" in answer):
        return 0.0
    return float(verify(truth, parse(answer, parsing_timeout=SECONDS), timeout_seconds=SECONDS))


def boxed(text: str) -> str | None:
    """The last complete ``\\boxed{...}``, itself included."""
    start = text.rfind("\\boxed{")
    depth = 0
    for place in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start : place + 1]
    return None
