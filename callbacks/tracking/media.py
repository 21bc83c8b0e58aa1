"""Images, sound and video as trackers take them: plain arrays, and files of widespread formats."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import GifImagePlugin, Image, PngImagePlugin  # the latter here, not by a thread that shall write a file

from .values import array_of, drawn


def pictures(value: Any, dataformats: str | None = None) -> list[np.ndarray]:
    """Return the images of `value`, each (height, width, channels) in uint8, one channel without the last dimension.

    `value` is an image, a batch or a list of images: tensors, arrays, PIL images or matplotlib figures. `dataformats`
    names dimensions as `SummaryWriter.add_images` does ("NCHW", "HWC"); without it, a dimension of 1, 3 or 4 before the
    sizes means channels first, as torch has them. Floats count from 0 to 1. Raises ValueError for other shapes.
    """
    if isinstance(value, (list, tuple)):
        return [picture for item in value for picture in pictures(item, _without_batch(dataformats))]
    array = drawn(value) if hasattr(value, "savefig") else array_of(value)
    if array is None:
        raise TypeError(f"Expected an image: a tensor, an array, a PIL image or a figure. Received: {type(value)!r}.")
    formats = dataformats or _guessed(array)
    if len(formats) != array.ndim or not set("HW") <= set(formats) <= set("NHWC"):
        raise ValueError(
            f"Expected an image (H, W), (C, H, W), (H, W, C) or a batch (N, C, H, W), (N, H, W, C). Received: "
            f'shape {array.shape}, dataformats={dataformats!r}. Give dataformats="NCHW" or the like.'
        )
    order = [formats.index(name) for name in "NHWC" if name in formats]
    batch = array.transpose(order)
    return [_shown(image) for image in (batch if "N" in formats else batch[None])]


def png(picture: np.ndarray) -> bytes:
    """Return an image of `pictures` as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, PngImagePlugin.PngImageFile.format)
    return buffer.getvalue()


def samples(value: Any) -> np.ndarray:
    """Return sound as float32 samples from -1 to 1: (samples,) or (samples, channels), however it was given."""
    array = array_of(value) if array_of(value) is not None else np.asarray(value)
    if array.dtype.kind in "iu":
        array = array / float(np.iinfo(array.dtype).max)
    if array.ndim == 2 and array.shape[0] < array.shape[1] and array.shape[0] <= 8:
        array = array.T
    return np.clip(array.astype(np.float32), -1.0, 1.0)


def wav(value: Any, sample_rate: int) -> bytes:
    """Return sound as a WAV file of 16 bits a sample."""
    sound = samples(value)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1 if sound.ndim == 1 else sound.shape[1])
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes((sound * 32767).round().astype("<i2").tobytes())
    return buffer.getvalue()


def frames(value: Any) -> np.ndarray:
    """Return video as uint8 (time, height, width, 3); (time, channels, height, width) is turned."""
    array = array_of(value)
    if array is None or array.ndim != 4:
        shape = getattr(array, "shape", value)
        raise ValueError(f"Expected a video (time, channels, height, width). Received: {shape}.")
    return np.stack([image if image.ndim == 3 else np.stack([image] * 3, axis=2) for image in pictures(array)])


def gif(value: Any, fps: float) -> bytes:
    """Return video as an animated GIF."""
    first, *rest = (Image.fromarray(frame[..., :3]) for frame in frames(value))
    buffer = io.BytesIO()
    options = {"save_all": True, "append_images": rest, "duration": round(1000 / fps), "loop": 0}
    first.save(buffer, GifImagePlugin.GifImageFile.format, **options)
    return buffer.getvalue()


def columns_and_rows(columns: Any, data: Any, dataframe: Any) -> tuple[list[str], list[list[Any]]]:
    """Return a table's column names and its rows, from a pandas frame or from lists."""
    if dataframe is not None:
        return [str(name) for name in dataframe.columns], dataframe.values.tolist()
    if data is None:
        raise ValueError("Expected rows of a table. Received: neither data nor dataframe. Give one of them.")
    rows = [list(row) for row in data]
    width = max((len(row) for row in rows), default=0)
    return [str(name) for name in columns] if columns is not None else [str(place) for place in range(width)], rows


def markdown(columns: list[str], rows: list[list[Any]]) -> str:
    """Return a table as Markdown."""

    def line(cells: list[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(columns), line(["---"] * len(columns)), *map(line, rows)])


def numbered(name: str, count: int) -> Iterator[str]:
    """Yield names for several things of one name: the name itself for one, "name/0", "name/1", … for more."""
    return iter([name]) if count == 1 else (f"{name}/{place}" for place in range(count))


def _guessed(array: np.ndarray) -> str:
    if array.ndim == 2:
        return "HW"
    if array.ndim in (3, 4):
        last = array.shape[-3] not in (1, 3) and array.shape[-1] in (1, 3, 4)
        return ("N" if array.ndim == 4 else "") + ("HWC" if last else "CHW")
    return ""


def _without_batch(dataformats: str | None) -> str | None:
    return dataformats.replace("N", "") if dataformats else None


def _shown(image: np.ndarray) -> np.ndarray:
    if image.dtype == np.bool_:
        image = image.astype(np.uint8) * 255
    elif image.dtype != np.uint8:
        scale = 1 if image.dtype.kind in "iu" else 255
        image = (np.nan_to_num(image.astype(np.float64)) * scale).clip(0, 255).round().astype(np.uint8)
    return np.ascontiguousarray(image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image)
