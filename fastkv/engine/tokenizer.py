"""Text to token ids and back, by the vocabulary that a GGUF file carries.

Owns the byte-level BPE tokenizer, the streaming detokeniser and the ChatML prompt format. Called by the engine's front
end (command line, examples); scheduler and worker only see ids. No Paddle here.

Decoding works on bytes: each token stands for some bytes, a UTF-8 character may span several tokens, and bytes that
are no UTF-8 become U+FFFD. So what a `StreamDecoder` emits piece by piece is always `decode` of all its tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from fastkv.engine.gguf_file import GGUFFile
from fastkv.errors import ConfigError, RequestError

SMOLLM2_SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What SmolLM2-Instruct was trained to see when a conversation has no system message."""

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that BPE never produces


def _split_digits() -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


# GGUF's tokenizer.ggml.pre -> how text is cut before BPE.
_PRE_TOKENIZERS = {"smollm": _split_digits, "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; role is system, user or assistant."""

    role: str
    content: str


class Tokenizer:
    """Byte-level BPE from GGUF metadata.

    Args:
        file: a parsed GGUF file.

    Raises:
        ConfigError: the vocabulary is missing, inconsistent or of another kind than byte-level BPE.
    Cost: about 0.3 s for 49,000 tokens and as many merges.
    """

    def __init__(self, file: GGUFFile) -> None:
        kind, pre = file.require("tokenizer.ggml.model", str), file.metadata.get("tokenizer.ggml.pre")
        if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
            raise ConfigError(
                f"{file.path}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported; supported is 'gpt2' "
                f"(byte-level BPE) with {' or '.join(map(repr, _PRE_TOKENIZERS))}"
            )
        tokens, types = _vocabulary(file)
        vocabulary = {token: index for index, token in enumerate(tokens)}
        bpe = models.BPE(vocab=vocabulary, merges=_merges(file, vocabulary))
        added = [token for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
        # Both share the model; only one of them knows the special tokens.
        self._with_special, self._plain = tokenizers.Tokenizer(bpe), tokenizers.Tokenizer(bpe)
        for tokenizer in (self._with_special, self._plain):
            tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
        self._with_special.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in added])
        self._token_bytes = [_token_bytes(t, kind) for t, kind in zip(tokens, types, strict=True)]
        known_bytes = {piece[0] for piece in self._token_bytes if len(piece) == 1}
        self._missing_bytes = frozenset(range(256)) - known_bytes
        self.special_ids = frozenset(index for index, kind in enumerate(types) if kind == _CONTROL)
        self.eos_id: int = file.require("tokenizer.ggml.eos_token_id", int)
        if not 0 <= self.eos_id < len(tokens):
            raise ConfigError(f"{file.path}: end-of-text id {self.eos_id} is outside its vocabulary of {len(tokens)}")
        ends = {vocabulary[token] for token in (END_OF_TEXT, IM_END) if token in vocabulary}
        self.stop_ids = frozenset({self.eos_id} | (ends & self.special_ids))

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._token_bytes)

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        """Token ids of a text; no token is added at either end.

        Args:
            text: any text; the empty one gives no tokens. Characters the vocabulary cannot express become U+FFFD.
            allow_special: whether "<|im_end|>" and the like in the text become control tokens. Say False for text
                from outside, which then cannot end its own turn.
        """
        tokenizer = self._with_special if allow_special else self._plain
        ids: list[int] = tokenizer.encode(self._expressible(text), add_special_tokens=False).ids
        return ids

    def _expressible(self, text: str) -> str:
        """The text with U+FFFD for what the vocabulary has no bytes for; BPE would drop those bytes in silence.

        SmolLM2 lacks six control characters and the first bytes of unassigned planes. Half a surrogate pair, which
        JSON can smuggle in, is no character at all.
        """
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if not self._missing_bytes & set(text.encode("utf-8")):
            return text
        return "".join("\ufffd" if self._missing_bytes & set(char.encode("utf-8")) else char for char in text)

    def encode_chat(
        self, messages: Sequence[ChatMessage], system_prompt: str | None = SMOLLM2_SYSTEM_PROMPT
    ) -> list[int]:
        """Ids of `chat_prompt`, except that control tokens written inside a message stay plain text."""
        ids: list[int] = []
        for message in _with_system(messages, system_prompt):
            ids += self._turn_start(message.role, message.content)
            ids += self.encode(IM_END) + self.encode("\n")
        return ids + self._turn_start("assistant", "")

    def _turn_start(self, role: str, content: str) -> list[int]:
        return self.encode(IM_START) + self.encode(f"{role}\n{content}", allow_special=False)

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of some tokens. Raises RequestError for an id outside the vocabulary."""
        pieces = (self.token_bytes(token_id, skip_special=skip_special) for token_id in token_ids)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The bytes a token stands for; none for a control token unless skip_special is False."""
        if not 0 <= token_id < len(self._token_bytes):
            raise RequestError(f"token id {token_id} is outside the vocabulary: 0 to {len(self._token_bytes) - 1}")
        return b"" if skip_special and token_id in self.special_ids else self._token_bytes[token_id]

    def stream(self, *, skip_special: bool = True) -> StreamDecoder:
        """A decoder for one output, to be fed token by token."""
        return StreamDecoder(self, skip_special=skip_special)


class StreamDecoder:
    """Decodes one output token by token and never emits part of a character.

    The concatenation of everything `feed` returned and of `finish` equals `Tokenizer.decode` of the tokens fed.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """Text that is complete with this token, often all of it, "" inside a character."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, skip_special=self._skip_special))

    def finish(self) -> str:
        """What is left when the output ends: U+FFFD for an unfinished character, else ""."""
        return self._decoder.decode(b"", final=True)


def chat_prompt(messages: Sequence[ChatMessage], system_prompt: str | None = SMOLLM2_SYSTEM_PROMPT) -> str:
    """ChatML text of a conversation that ends where the assistant is to speak.

    Args:
        messages: the turns so far.
        system_prompt: put first if the conversation does not start with a system message; None for none.

    Raises:
        RequestError: no messages, or a role that ChatML does not know.
    """
    turns = (f"{IM_START}{m.role}\n{m.content}{IM_END}\n" for m in _with_system(messages, system_prompt))
    return "".join(turns) + f"{IM_START}assistant\n"


def _with_system(messages: Sequence[ChatMessage], system_prompt: str | None) -> list[ChatMessage]:
    if not messages:
        raise RequestError("a conversation needs at least one message")
    for message in messages:
        if message.role not in ("system", "user", "assistant"):
            raise RequestError(f"chat role {message.role!r} is unknown; use system, user or assistant")
    has_system = messages[0].role == "system" or system_prompt is None
    return list(messages) if has_system else [ChatMessage("system", system_prompt or ""), *messages]


def _vocabulary(file: GGUFFile) -> tuple[list[str], list[int]]:
    tokens = file.require("tokenizer.ggml.tokens", list)
    types = file.require("tokenizer.ggml.token_type", list)
    if len(tokens) != len(types) or not all(isinstance(token, str) for token in tokens):
        raise ConfigError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types; convert the model again")
    return tokens, types


def _merges(file: GGUFFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in file.require("tokenizer.ggml.merges", list):
        left, _, right = str(merge).partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ConfigError(f"{file.path}: merge {merge!r} does not fit its vocabulary; convert the model again")
        merges.append((left, right))
    return merges


def _byte_alphabet() -> Mapping[str, int]:
    """Byte-level BPE writes bytes as characters: printable Latin-1 as itself, the others from U+0100 upwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return MappingProxyType(alphabet)


_BYTE_OF = _byte_alphabet()


def _token_bytes(token: str, kind: int) -> bytes:
    if kind in (_CONTROL, _USER_DEFINED) or any(char not in _BYTE_OF for char in token):
        return token.encode("utf-8")
    return bytes(_BYTE_OF[char] for char in token)
