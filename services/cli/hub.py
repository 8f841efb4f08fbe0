"""Models by their id on the Hugging Face hub, brought into its cache on this machine.

The hub's library takes its settings from the environment, under the names that its own tools have: HF_TOKEN (or what
`hf auth login` left), HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE. It draws progress bars where a terminal is, and nothing
elsewhere. Everything that can go wrong is one HubError.

    HubError
"""

import re
from pathlib import Path

_TEXTS = [
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "modules.json",
    "*_Pooling/config.json",
]
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_OTHERS = ["*/*.safetensors*", "*/tokenizer*", "consolidated*"]  # the same weights again, in other programs' order

# What a person runs once for a model whose weights are only there as pickles.
CONVERSION = (
    'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
    "[C.from_pretrained('{id}').save_pretrained('DIR') for C in (M, T)]\""
)


class HubError(Exception):
    """A model that could not be had. The message is one line for a person."""


def is_id(text: str) -> bool:
    """True for what may be an id on the hub: `organisation/name`."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", text) is not None and not text.startswith(".")


def fetch(id: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The directory with a model's configuration, tokenizer and, where wanted, weights. Raises HubError.

    Downloads what is not in the cache. Where the hub cannot be reached, a copy in the cache will do.
    """
    import httpx2
    from huggingface_hub import errors, snapshot_download

    try:
        path = snapshot_download(
            id, revision=revision, allow_patterns=_TEXTS + _WEIGHTS * weights, ignore_patterns=_OTHERS
        )
    except errors.GatedRepoError:
        raise HubError(f"{id} is open only to those who asked: ask on its page, and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"{id} is no directory here, and no model on the hub; or one that is shown only to its owner's HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{id} has no revision {revision} on the hub") from None
    except errors.LocalEntryNotFoundError:
        raise HubError(
            f"{id} is not whole in the cache, and the hub cannot be reached: run `hf download {id}` where it can, "
            "with the same HF_HOME, or give --model a directory"
        ) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, httpx2.HTTPError, OSError) as error:
        raise HubError(f"{id} could not be fetched from the hub: {_first_line(error)}") from error
    if weights and not any(Path(path).glob("*.safetensors")):
        raise HubError(
            f"{id} has no *.safetensors. If it has a .gguf file, download that and name it (--model FILE.gguf); "
            f"else convert the model once, for --model DIR: {CONVERSION.format(id=id)}"
        )
    return Path(path)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
