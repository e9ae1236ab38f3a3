"""Equal names as one object: of groups, topics, endpoints and answers there are few, each in
very many transactions."""

from functools import lru_cache


@lru_cache(maxsize=10_000)
def intern(text: str) -> str:
    """Return an equal text, the same object each time as long as it is in use."""
    return text
