"""The sizes and counts that bound what one request may ask for, in one place.

Every limit is stated in the message of the rejection that enforces it.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_REQUEST_ID_LENGTH = 256
"""Characters in a request id."""
MAX_METADATA_ENTRIES = 64
"""Entries in ``GenerateRequest.metadata``."""
MAX_METADATA_BYTES = 16 * 1024
"""Bytes of all metadata keys and values together, in UTF-8."""
MAX_CACHE_SALT_BYTES = 1024
"""Bytes of ``kv.cache_salt``, in UTF-8."""

MAX_GUIDE_BYTES = 256 * 1024
"""Bytes of a guide (schema, expression, grammar, tag, or all choices together), in UTF-8."""
MAX_GUIDE_CHOICES = 1024
"""Entries in ``guided.choice.choices``."""
MAX_GUIDE_REASON_LENGTH = 300
"""Characters of what a guide's compiler says, in the rejection that cites it."""
MAX_WAITING_GUIDES = 64
"""Guides that are being compiled or wait for it; more are turned away as overload."""
MAX_REMEMBERED_GUIDES = 1024
"""Verdicts on guides that are kept, so that a guide is compiled for its first request only."""
GUIDE_CPU_SECONDS = 3.0
"""Processor time that compiling one guide may take, on all threads together."""
GUIDE_WALL_SECONDS = 15.0
"""Time after which a compilation that did not get its share of a processor is given up."""
GUIDE_REHEARSAL_TOKENS = 64
"""Tokens that a guide is followed for before it is let to the engine."""
GUIDE_STEP_SECONDS = 0.1
"""Processor time that each of these may take; the engine stands still for as long."""
GUIDE_MEMORY_BYTES = 2 * 1024**3
"""Memory that compiling one guide may take."""

MAX_LOGIT_BIAS = 1024
"""Token ids in ``extra.logit_bias``. Here and in the next four, vLLM's GPU workers stop for good
at more."""
MAX_ALLOWED_TOKEN_IDS = 1024
"""Token ids in ``extra.allowed_token_ids``."""
MAX_BAD_WORDS = 64
"""Texts in ``extra.bad_words``; vLLM bans each with and without a space in front, 128 in all."""
MAX_BAD_WORDS_BYTES = 400
"""Bytes of these together, in UTF-8; vLLM takes 1024 tokens."""
MAX_STOP_TOKENS_WITH_MINIMUM = 96
"""Stop token ids beside ``stopping.min_tokens``; vLLM takes 128, the model's own included."""

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits on one request that an operator can set."""

    max_sequences: int = 128
    """Largest ``sampling.num_sequences``."""
    max_stop_conditions: int = 256
    """Entries in ``stopping.conditions``."""
    max_stop_bytes: int = 16 * 1024
    """Bytes of all stop texts together, in UTF-8."""
    max_response_bytes: int = 4 * MIB
    """Bytes of one response message; gRPC clients take 4 MiB unless told otherwise."""
