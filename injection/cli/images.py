"""Images in prompts: reading them within bounds, and what the model's own processor makes of them beside the tokens."""

from __future__ import annotations

import base64
import binascii
import hashlib
import inspect
import io
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moegraft.injection.meta_model import read_config
from moegraft.operators.errors import MoegraftError, error_sentence
from moegraft.operators.structure import sees_whole_images

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # those of OpenAI and Anthropic; of an animation, the first picture
MOST_PIXELS = 1 << 26  # of all images of a prompt together, which take 3 bytes each while they are prepared
MOST_PREPARED_BYTES = 1 << 32  # of what processors make of the images of all requests that run or wait
MOST_FILE_BYTES = 1 << 26
MOST_IMAGES = 64


class ImageError(MoegraftError):
    """An image, or a prompt with images, that cannot be used; the message may be shown to a client."""


@dataclass(frozen=True, eq=False, slots=True)
class Picture:
    """An image in RGB, the SHA-256 of its file, and the name of that."""

    image: Image
    digest: bytes
    name: str = "image"

    @property
    def pixels(self) -> int:
        return int(self.image.width * self.image.height)


def decode_picture(data: bytes, name: str = "image", most_pixels: int = MOST_PIXELS) -> Picture:
    """Decode the content of a file, turned as its EXIF data ask for.

    Raises:
        ImageError: it is damaged, of another format, or has more than `most_pixels`, which is found out before it is decoded.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > most_pixels:
                of_prompt = "" if most_pixels == MOST_PIXELS else ", of which other images of the prompt have a part"
                limit = f"the limit of {MOST_PIXELS / 1e6:.0f} million for a prompt{of_prompt}"
                raise ImageError(f"{name}: {image.width} x {image.height} pixels exceed {limit}; send a smaller image")
            image.load()  # here, so that what is raised below is about the EXIF data alone, without which an image is shown as it is
            with suppress(OSError, ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, struct.error):
                ImageOps.exif_transpose(image, in_place=True)
            return Picture(_in_rgb(image), hashlib.sha256(data).digest(), name)
    except UnidentifiedImageError as error:
        raise ImageError(f"{name}: not an image of the formats {', '.join(FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name}: more pixels than the limit of {MOST_PIXELS / 1e6:.0f} million; send a smaller image") from error
    except ImageError:
        raise
    except (OSError, ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, struct.error) as error:
        # Pillow's decoders raise what Python does for damaged files.
        raise ImageError(f"{name}: the image is damaged ({error})") from error


def _in_rgb(image: Image) -> Image:
    """Return an image in RGB; where it is transparent, on white, as on a page: the hidden colours of black text on nothing are black."""
    from PIL import Image as Images

    if image.mode == "I" or image.mode.startswith("I;16"):  # 16 bits of grey, of which Pillow's conversion makes all above 255 white
        image = image.convert("I").point(lambda grey: grey * (1 / 257) + 0).convert("L")
        image.info.pop("transparency", None)
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image if image.mode == "RGBA" else image.convert("RGBA")
    page = Images.new("RGB", image.size, "white")
    page.paste(image, mask=image)
    return page


def sample_picture() -> Picture:
    """Return a small picture that is not uniform."""
    from PIL import Image

    return Picture(Image.linear_gradient("L").convert("RGB"), b"test")


def read_picture(path: Path, name: str = "", most_pixels: int = MOST_PIXELS) -> Picture:
    """Read an image from a file.

    Raises:
        ImageError: there is no such file, or it is no image.
    """
    name = name or str(path)
    try:
        about = path.stat()  # before it is opened: opening a pipe waits for its other end
        if not stat.S_ISREG(about.st_mode):
            raise ImageError(f"{name}: not a file")
        if about.st_size > MOST_FILE_BYTES:
            raise ImageError(f"{name}: {about.st_size} bytes exceed the limit of {MOST_FILE_BYTES} for a file")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise ImageError(f"{name}: the file cannot be read ({error_sentence(error)})") from error
    return decode_picture(data, name, most_pixels)


def read_url(url: str, folder: Path | None, most_pixels: int = MOST_PIXELS) -> Picture:
    """Return the image of a `data:` URL, or of a `file:` URL within `folder`; nothing is fetched from other machines.

    Args:
        folder: whose files clients may name; None: no files.

    Raises:
        ImageError: the URL is of another kind, names no file in the folder, or its content is no image.
    """
    scheme = url[:16].partition(":")[0].lower()
    if scheme == "data":
        about, comma, content = url.partition(",")
        if not comma or not about.lower().endswith(";base64"):
            raise ImageError("image: a data URL has the form data:image/png;base64,CONTENT")
        try:
            data = base64.b64decode("".join(content.split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise ImageError(f"image: the content of the data URL is not base64 ({error})") from error
        return decode_picture(data, most_pixels=most_pixels)
    if scheme == "file":
        if folder is None:
            raise ImageError("image: this server reads no files; --image-folder FOLDER allows those of a folder")
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path))
            found = path.resolve(strict=True) if parts.netloc in ("", "localhost") else None
        except (OSError, ValueError, RuntimeError):
            found = None
        if found is None or not found.is_relative_to(folder.resolve()):  # links out of the folder are followed first
            raise ImageError("image: there is no such file in the folder that this server allows")
        return read_picture(found, path.name, most_pixels)
    if scheme in ("http", "https"):
        raise ImageError("image: images are not fetched from other machines; send the content as data:image/png;base64,CONTENT")
    raise ImageError("image: a data URL is expected, as data:image/png;base64,CONTENT, or a file URL")


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """What a prompt with images has beside its tokens.

    Attributes:
        token_ids: of the whole prompt; each image has many.
        cache_ids: the same, with numbers below 0 that depend on the images' content in place of the images' tokens and of others that
            the model computes as a part of them: prompts whose `cache_ids` are equal have the same keys and values.
        start, end: these tokens are within these places of the prompt, which are computed in one pass.
    """

    token_ids: list[int]
    cache_ids: list[int]
    start: int
    end: int
    _tensors: Mapping[str, torch.Tensor]  # of the processor: with one value for each token (1, T), and of all images together
    _model: PreTrainedModel

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def usable(self, shared: int) -> int:
        """Return how many of the first `shared` tokens another prompt's cache can provide: all images or none."""
        return shared if shared >= self.end else min(shared, self.start)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """The model's own positions, (1, T) or (axes, 1, T) int64; to be asked in the thread that owns the model."""
        model: Any = self._model
        ids = torch.tensor([self.token_ids], device=model.device)
        given = {"attention_mask": torch.ones_like(ids), **{name: t.to(model.device) for name, t in self._tensors.items()}}
        with without_position_state(model):
            found: torch.Tensor = model._prepare_position_ids_for_generation(ids, given)
        return found

    @cached_property
    def position_shift(self) -> int:
        """By how much the positions of tokens after the images exceed their numbers in the text; usually below 0."""
        own = self.position_ids  # (axes, 1, T): of four axes, the first has the numbers of tokens
        return int(own[-3:].max() if own.dim() == 3 else own.max()) + 1 - len(self.token_ids)

    def arguments(self, begin: int, end: int) -> dict[str, Any]:
        """Return the arguments of a forward pass over the tokens from `begin` to `end`, among which are all images."""
        length = len(self.token_ids)
        found = {name: t[:, begin:end] if t.dim() == 2 and t.shape == (1, length) else t for name, t in self._tensors.items()}
        found["position_ids"] = self.position_ids[..., begin:end]
        return {name: tensor.to(self._model.device) for name, tensor in found.items()}

    def generate_arguments(self, cached: int) -> dict[str, torch.Tensor]:
        """Return the arguments of `generate` for the whole prompt, of which a cache holds the first `cached` tokens: `usable` ones."""
        tensors = self._tensors if cached < self.end else {}
        return {name: t.to(self._model.device) for name, t in {**tensors, "position_ids": self.position_ids}.items()}


@contextmanager
def without_position_state(model: PreTrainedModel) -> Iterator[None]:
    """Let a model forget afterwards by how much the images of the body's prompt shift positions, which it keeps for its next call."""
    keepers: list[Any] = [module for module in model.modules() if hasattr(module, "rope_deltas")]
    before = [module.rope_deltas for module in keepers]
    try:
        yield
    finally:
        for module, deltas in zip(keepers, before, strict=True):
            module.rope_deltas = deltas


class ImageReader:
    """A model's processor of images.

    Args:
        processor: of transformers, whose processors of other media may be None.
    """

    def __init__(self, model: PreTrainedModel, processor: Any) -> None:
        self._model = model
        self._processor = processor
        self._token = int(model.config.image_token_id)

    def inputs(self, text: str, pictures: Sequence[Picture]) -> ImageInputs:
        """Return the inputs of a text that has the model's mark of an image for each picture.

        Raises:
            ImageError: the text has more or fewer marks, or the processor refuses an image.
        """
        mark = getattr(self._processor, "image_token", None)
        if mark and text.count(mark) != len(pictures):
            raise ImageError(f"images: the text has {text.count(mark)} marks {mark} for {len(pictures)} images; leave them out of messages")
        try:
            made = self._processor(text=[text], images=[each.image for each in pictures], add_special_tokens=False, return_tensors="pt")
        except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, OSError) as error:
            raise ImageError(f"images: the model's processor refuses them ({error_sentence(error)})") from error
        token_ids = made["input_ids"][0].tolist()
        places = [place for place, token in enumerate(token_ids) if token == self._token]
        if not places:
            raise ImageError("images: the model's processor gives them no tokens")
        tensors = {name: tensor for name, tensor in made.items() if isinstance(tensor, torch.Tensor)}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("input_ids", "attention_mask")}
        # Towers convert pixels in float32 themselves, and not those that a processor gives in bfloat16 (Llama 4's).
        tensors = {name: tensor.to(self._model.dtype) if tensor.dtype == torch.bfloat16 else tensor for name, tensor in tensors.items()}
        for types in tensors.values():
            if types.shape == (1, len(token_ids)):  # of tokens, whose type may be that of an image for marks around it as well
                places += types[0].nonzero()[:, 0].tolist()
        digest = hashlib.sha256(b"".join(each.digest for each in pictures)).digest()
        words = [-1 - (word >> 1) for word in struct.unpack("<4Q", digest)]
        cache_ids = list(token_ids)
        for number, place in enumerate(sorted(set(places))):
            cache_ids[place] = words[number % len(words)]
        # Where tokens of an image see later ones of it, the model's mask counts them from the beginning of the pass.
        start = 0 if sees_whole_images(self._model.config) else min(places)
        return ImageInputs(token_ids, cache_ids, start, max(places) + 1, tensors, self._model)


def read_image_reader(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> ImageReader | str:
    """Return what reads images for a model, or the reason why none can be read.

    Processors of videos and of sound are left out, as those of videos need torchvision.
    """
    if "pixel_values" not in inspect.signature(model.forward).parameters or getattr(model.config, "image_token_id", None) is None:
        return "this model reads text, and no images"
    try:
        import PIL  # noqa: F401
    except ImportError:
        return "images need Pillow, which is not installed: pip install 'moegraft[images]'"
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind: Any = PROCESSOR_MAPPING.get(type(model.config), None)
    if kind is None:  # of a part of the whole model whose processor it is
        with suppress(MoegraftError):
            kind = PROCESSOR_MAPPING.get(type(read_config(folder)), None)
    if kind is None:
        return f"transformers has no processor of images for models of type {model.config.model_type}"
    try:
        of_images: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, argument: None})
        settings, _ = kind.get_processor_dict(folder)
        own = {"tokenizer": tokenizer, "image_processor": AutoImageProcessor.from_pretrained(folder)}
        processor = of_images.from_args_and_dict([own.get(name) for name in kind.get_attributes()], settings)
    except ImportError as error:  # of torchvision, as many processors need it, and all of them with transformers 5.17
        return f"this model's processor of images cannot be imported ({error_sentence(error).partition('. Check')[0]})"
    except (LookupError, OSError, ValueError, TypeError, AttributeError) as error:
        return f"the files beside this model have no processor of images ({error_sentence(error)})"
    if tokenizer.chat_template is None and isinstance(settings.get("chat_template"), str):
        tokenizer.chat_template = settings["chat_template"]
    return ImageReader(model, processor)
