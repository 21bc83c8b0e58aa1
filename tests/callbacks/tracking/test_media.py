"""Images, sound and video as files and arrays."""

from __future__ import annotations

import io
import wave

import numpy as np
import pytest
import torch
from PIL import Image

from drivetrain.callbacks.tracking import media
from drivetrain.callbacks.tracking.journal import Entry

CHW = torch.arange(24, dtype=torch.uint8).reshape(3, 2, 4)
HWC = CHW.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("value, formats", [
    (CHW, None), (CHW.numpy(), None), (HWC, None), (Image.fromarray(HWC), None), (CHW[None], None), ([CHW], None),
    (CHW.permute(2, 1, 0), "WHC"), (CHW[None].permute(0, 3, 2, 1), "NWHC"), (CHW.float() / 255, None),
    (CHW.double().numpy() / 255, None),
])  # fmt: skip
def test_pictures_are_uint8_with_channels_last(value, formats):
    (picture,) = media.pictures(value, formats)
    assert picture.dtype == np.uint8 and picture.tolist() == HWC.tolist()


def test_batches_grey_ones_and_wrong_ones():
    assert [picture.shape for picture in media.pictures(torch.zeros(5, 1, 2, 3))] == [(2, 3)] * 5
    assert media.pictures(np.array([[0.0, 0.5], [1.0, 2.0]]))[0].tolist() == [[0, 128], [255, 255]]
    assert media.pictures(np.array([[True, False]]))[0].tolist() == [[255, 0]]
    with pytest.raises(ValueError, match=r"Received: shape \(3,\)"):
        media.pictures(torch.zeros(3))
    with pytest.raises(TypeError, match="Expected an image"):
        media.pictures("a")


def test_a_figure_is_its_picture():
    from matplotlib.figure import Figure

    (picture,) = media.pictures(Figure(figsize=(2, 1), dpi=50, facecolor="blue"))
    assert picture.shape == (50, 100, 4) and (picture == [0, 0, 255, 255]).all()


def test_files_are_what_they_say():
    assert np.asarray(Image.open(io.BytesIO(media.png(HWC)))).tolist() == HWC.tolist()
    with wave.open(io.BytesIO(media.wav(torch.tensor([[0.0, 1.0, -1.0, 0.5]] * 2), 8000))) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 8000, 4)
        assert np.frombuffer(file.readframes(4), "<i2").reshape(-1, 2)[:, 0].tolist() == [0, 32767, -32767, 16384]
    film = Image.open(io.BytesIO(media.gif(torch.stack([CHW, 255 - CHW]), fps=4)))
    assert film.n_frames == 2 and film.info["duration"] == 250
    assert media.markdown(["a", "b|c"], [[1, "x"]]) == "| a | b\\|c |\n| --- | --- |\n| 1 | x |"


def test_tables_come_from_lists_and_frames():
    import pandas

    frame = pandas.DataFrame({"x": [1, 2], "y": ["a", "b"]})
    expected = (["x", "y"], [[1, "a"], [2, "b"]])
    assert media.columns_and_rows(None, None, frame) == media.columns_and_rows(["x", "y"], [(1, "a"), (2, "b")], None) == expected
    assert media.columns_and_rows(None, [[1, 2]], None) == (["0", "1"], [[1, 2]])


def test_entries_keep_arrays_and_bytes():
    values = {"a": torch.arange(3, dtype=torch.bfloat16), "b": [np.float64(0.5), b"\x00\xff"], "c": HWC, "d": np.array(2)}
    back = Entry.parse(Entry("log", values, 3, {}, 0.5).line())
    assert back.values["a"].tolist() == [0.0, 1.0, 2.0] and back.values["b"] == [0.5, b"\x00\xff"] and back.values["d"] == 2
    assert back.values["c"].dtype == np.uint8 and back.values["c"].tolist() == HWC.tolist()
