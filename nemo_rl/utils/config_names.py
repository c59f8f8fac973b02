"""The names that a config key may have been meant as: those of our models, and those that existing recipes hold."""

from __future__ import annotations

import difflib
import functools
from importlib import resources

_MAX_LISTED_NAMES = 12


@functools.cache
def recipe_names() -> frozenset[str]:
    """Dotted names of every leaf that the recipes of the original project hold."""
    text = resources.files("nemo_rl.utils").joinpath("recipe_keys.txt").read_text(encoding="utf-8")
    return frozenset(text.split())


@functools.cache
def recipe_sections() -> frozenset[str]:
    """Dotted names of every section above a recipe leaf."""
    parts = (name.split(".") for name in recipe_names())
    return frozenset(".".join(part[:depth]) for part in parts for depth in range(1, len(part)))


def unknown_line(dotted: str, names: set[str]) -> str:
    """What to say of an unknown key: the nearest of `names`, else of the recipes' names, else what its section has."""
    pattern = ".".join("*" if part.isdigit() else part for part in dotted.split("."))
    guess = _nearest(pattern, names) or _nearest(pattern, recipe_names() | recipe_sections())
    if guess is not None:
        return f"{dotted}: unknown key, did you mean {_with_places(guess, dotted)}?"
    parent, known = _siblings(pattern, names)
    parent = _with_places(parent, dotted)
    listed = ", ".join(sorted(known)[:_MAX_LISTED_NAMES]) + (", ..." if len(known) > _MAX_LISTED_NAMES else "")
    return f"{dotted}: unknown key; {parent or 'the top level'} has {listed or 'no keys'}"


def _with_places(pattern: str, dotted: str) -> str:
    """`pattern` with the places in lists that `dotted` has, as far as both name the same lists."""
    parts = pattern.split(".")
    for i, (part, place) in enumerate(zip(parts, dotted.split("."), strict=False)):
        if part == "*" and place.isdigit():
            parts[i] = place
        elif part != place:
            break
    return ".".join(parts)


def _siblings(dotted: str, names: set[str] | frozenset[str]) -> tuple[str, set[str]]:
    """The deepest section of `dotted` that exists, and the names directly below it."""
    parent = dotted
    while parent:
        parent = parent.rpartition(".")[0]
        at = f"{parent}." if parent else ""
        below = {name[len(at) :] for name in names if name.startswith(at)}
        if below:
            return parent, {name for name in below if "." not in name}
    return "", set()


def _nearest(dotted: str, names: set[str] | frozenset[str]) -> str | None:
    """The known name that `dotted` most likely means: a sibling, or the same last word elsewhere."""
    parent, siblings = _siblings(dotted, names)
    at = f"{parent}." if parent else ""
    first, _, rest = dotted[len(at) :].partition(".")
    close = difflib.get_close_matches(first, siblings, n=1, cutoff=0.7)
    if close:
        whole = f"{at}{close[0]}.{rest}"
        return whole if rest and whole in names else f"{at}{close[0]}"
    last = dotted.rpartition(".")[2]
    elsewhere = sorted((name for name in names if name.rpartition(".")[2] == last), key=lambda name: (len(name), name))
    return elsewhere[0] if elsewhere else None
