"""The board of prefix caches: what they save, whether gateways know it, and how much room there is."""

from helm.boards.panels import Board, Panel, Row, Shape
from helm.boards.queries import Queries

_PROMPTS, _CACHED = "baton_prompt_tokens_total", "baton_cached_tokens_total"
_PREDICTED, _ACTUAL = "baton_cached_tokens_predicted_total", "baton_cached_tokens_actual_total"


def make_cache(q: Queries) -> Board:
    """Makes the board. Raises ValueError where a panel asks for what no metric has."""
    cached, predicted, actual = q.rate(_CACHED), q.rate(_PREDICTED), q.rate(_ACTUAL)
    saved = [
        Panel("Share of prompts' tokens that caches had", [cached.over(q.rate(_PROMPTS), "cached")], "percentunit"),
        Panel(
            "Tokens of prompts, each second",
            [q.rate(_PROMPTS).named("all"), cached.named("cached")],
        ),
        Panel("Tokens that steps compute, each second", [q.rise_of_workers("baton_worker_computed_tokens")]),
    ]
    index = [
        Panel(
            "Cached tokens, as promised and as found",
            [predicted.named("promised by the index"), actual.named("found by workers")],
        ),
        Panel("Found, of those that were promised", [actual.over(predicted, "found")], "percentunit"),
        Panel("Entries in Redis that no worker writes", [q.of_gateways("baton_index_malformed_entries")]),
    ]
    blocks = [
        Panel("Blocks that are free or evictable", [q.of_workers("baton_blocks_available")]),
        Panel("Cached blocks evicted, each second", [q.rise_of_workers("baton_worker_evicted_blocks")], "cps"),
        Panel("Plans for the cache's sake", [q.rate("baton_plans_total", "plan", where='why="cached"')], "reqps"),
    ]
    phases = [
        Panel("Lookups in the index", q.quantiles("baton_phase_seconds", where='phase="lookup"'), "s"),
        Panel("Prefill, by time", q.quantiles("baton_phase_seconds", where='phase="prefill"'), "s"),
        Panel("First tokens by their time", [q.buckets("baton_ttft_seconds")], "s", Shape.HEAT),
    ]
    rows = [Row("What caches save", saved), Row("The index", index), Row("Blocks", blocks), Row("Time", phases)]
    return Board("cache", "Baton: cache", rows)
