"""Words for fields that are known and not supported: what to do instead of them."""

from collections.abc import Mapping

_GUIDED = "'{name}' is not supported by this server: use 'structured_outputs'."

REASONS: Mapping[str, str] = {
    "images": "'images' is not supported by this server: models read text.",
    "suffix": "'suffix' is not supported by this server: text is generated after a prompt, not into it.",
    "use_beam_search": "'use_beam_search' is not supported by this server: answers are sampled, without beam search.",
    "length_penalty": "'length_penalty' is not supported by this server: it belongs to beam search.",
    "best_of": "'best_of' is not supported by this server: ask for 'n' choices with 'logprobs', and choose among them.",
    "thread": "'thread' is not supported by this server, which keeps no conversation: send all of it.",
    **{
        name: _GUIDED.format(name=name)
        for name in (
            "guided_choice",
            "guided_grammar",
            "guided_json",
            "guided_regex",
            "guided_whitespace_pattern",
        )
    },
}
