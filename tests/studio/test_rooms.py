"""A click through every room, in a real browser."""

from __future__ import annotations

import io
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import numpy
import pytest
from PIL import Image
from playwright.sync_api import expect

from mmdgs.studio import plane, restoring
from mmdgs.studio.streaming import JOBS


def names_in(file: Path) -> set[str]:
    with zipfile.ZipFile(file) as archive:
        return {Path(name).name for name in archive.namelist()}


def test_plane_follows_a_click_and_chains_mix(visit, tmp_path: Path) -> None:
    one = visit()
    page = one.page
    box = page.locator("#plane-picture img").bounding_box()
    page.locator("#plane-picture img").click(position={"x": 0.75 * box["width"], "y": 0.5 * box["height"]})
    page.wait_for_function("Math.abs(document.querySelector('#plane-x input').value - 1) < 0.05")
    kl = plane.look("mog", 0.3, (float(page.locator("#plane-x input").input_value()), 0.0)).kl
    page.wait_for_function(f"document.querySelector('#plane-panels').innerText.includes('{kl['full']:.3f}')")
    assert names_in(one.download("plane", tmp_path / "plane.zip")) == {"plane.png", "plane.npz"}
    one.set("plane-steps", 20)
    page.locator("#plane-go").click()
    one.expect_status("plane", "Step 20 of 20")
    right = plane.chains("mog", "full", 0.3, count=300, steps=20)
    assert f"MMD {right.mmd:.4f}" in one.status("plane")
    assert "(right: 25%)" in page.locator("#plane-weights").inner_text()
    page.locator("#plane-lines button").first.click()
    assert "mmdgs plane mog --sigma 0.3 --method full" in page.locator("#plane-command").inner_text()


def test_image_shows_its_posterior_at_once_and_walks(visit, tmp_path: Path) -> None:
    one = visit()
    page = one.page
    one.room("Image")
    page.locator("#image-go").click()
    one.expect_status("image", "Done")
    assert page.locator("#image-pictures figure").count() == 4 + 4
    before = page.locator("#image-moved img").get_attribute("src")
    one.set("image-walk-1", 2)
    page.wait_for_function(f"document.querySelector('#image-moved img').src != '{before}'")
    assert "+2.0, +0.0, +0.0" in page.locator("#image-moved").inner_text()
    assert {"arrays.npz", "noisy.npy", "again.py"} <= names_in(one.download("image", tmp_path / "image.zip"))


def test_a_region_is_chosen_by_two_clicks(visit) -> None:
    one = visit()
    page = one.page
    one.room("Image")
    page.locator("#image-part button").first.click()
    picture = page.locator("#image-region img")
    for share, words in ((0.27, "One corner at 7, 7"), (0.73, "14 x 14 pixels from 7, 7")):
        picture.wait_for()
        page.wait_for_function("(one => one.complete && one.naturalWidth)(document.querySelector('#image-region img'))")
        box, before = picture.bounding_box(), picture.get_attribute("src")
        side = min(box["width"], box["height"])
        left, top = (box["width"] - side) / 2, (box["height"] - side) / 2
        picture.click(position={"x": left + share * side, "y": top + share * side})
        expect(page.locator("#image-where")).to_contain_text(words)
        expect(picture).not_to_have_attribute("src", before)
    page.locator("#image-whole").click()
    expect(page.locator("#image-where")).to_contain_text("The whole image.")


def test_each_kind_of_damage_has_a_slider_of_its_own(visit) -> None:
    """So no limits change under a click that comes before the page hears of the new kind."""
    one = visit()
    page = one.page
    one.room("Restore")
    for kind, short in restoring.OPERATORS.items():
        one.choose("restore-kind", kind, exact=kind == "blur")  # another one is "motion blur"
        for other in restoring.STRENGTHS:
            expect(page.locator(f"#restore-{other}")).to_be_visible(visible=other == short)
    one.choose("restore-kind", "a missing box")
    one.choose("restore-kind", "missing pixels")
    page.locator("#restore-go").click()
    one.expect_status("restore", "is done")
    page.locator("#restore-lines button").first.click()
    expect(page.locator("#restore-command")).to_contain_text("--operator random:0.7")
    page.locator("#restore-stop").click()


def test_restoration_shows_a_kept_example_and_paints_a_mask(visit, tmp_path: Path) -> None:
    one = visit()
    page = one.page
    one.room("Restore")
    page.locator("#restore-go").click()
    one.expect_status("restore", "Done: 4 draws")
    assert "mean.png" in names_in(one.download("restore", tmp_path / "restored.zip"))
    one.choose("restore-kind", "paint a mask")
    page.locator("#restore-go").click()
    assert one.error() == "Paint over the part of the image that is to be restored, and then restore it."
    canvas = page.locator("#restore-paint canvas").first
    canvas.wait_for()
    page.wait_for_timeout(1500)
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.5 * box["height"], steps=8)
    page.mouse.up()
    page.wait_for_timeout(1000)
    page.locator("#restore-more button").first.click()
    one.set("restore-draws", 1)
    one.set("restore-steps", 5)
    page.locator("#restore-go").click()
    one.expect_status("restore", "Done: 1 draws")
    with zipfile.ZipFile(one.download("restore", tmp_path / "painted.zip")) as archive:
        mask = numpy.asarray(Image.open(io.BytesIO(archive.read("restored/mask.png"))))
    assert 0.02 < (mask == 0).mean() < 0.5
    assert mask[16, 16] == 0
    assert mask[2, 2] == 255


def test_the_stop_button_ends_a_run_and_the_room_goes_on(visit) -> None:
    one = visit()
    page = one.page
    one.room("Sampler")
    one.set("sampler-count", 1)
    one.set("sampler-steps", 100)
    page.locator("#sampler-go").click()
    page.locator("#sampler-pictures figure").first.wait_for()
    page.locator("#sampler-stop").click()
    one.expect_status("sampler", "Stopped")
    shown = page.locator("#sampler-pictures").inner_text()
    page.wait_for_timeout(1500)
    assert page.locator("#sampler-pictures").inner_text() == shown, "nothing moves after a stop"
    one.set("sampler-steps", 5)
    page.locator("#sampler-go").click()
    one.expect_status("sampler", "Done")
    assert "evaluations a sample" in page.locator("#sampler-pictures").inner_text()


def test_the_stop_button_ends_a_posterior_between_evaluations(visit) -> None:
    one = visit()
    page = one.page
    one.room("Image")
    one.choose("image-model", "cifar10")
    expect(page.locator("#image-example input")).to_have_value("cifar10-car")
    page.locator("#image-more button").first.click()
    page.locator("#image-seed input").fill("1")  # no result is kept for it
    page.locator("#image-go").click()
    one.expect_status("image", "The mean is there")
    page.locator("#image-stop").click()
    one.expect_status("image", "Stopped")
    assert page.locator("#image-pictures figure").count() == 4, "what was there stays"
    one.set("image-draws", 0)
    one.set("image-components", 0)
    page.locator("#image-go").click()
    one.expect_status("image", "Done")


def test_another_click_on_go_ends_the_run_before(visit) -> None:
    one = visit()
    one.set("plane-steps", 900)
    one.page.locator("#plane-go").click()
    one.expect_status("plane", "of 900")
    one.set("plane-steps", 20)
    one.page.locator("#plane-go").click()
    one.expect_status("plane", "Step 20 of 20")


def test_two_people_at_once_see_their_own(visit) -> None:
    first, second = visit(), visit()
    for one, seed in ((first, 1), (second, 2)):
        one.set("plane-steps", 100)
        one.page.locator("#plane-seed input").fill(str(seed))
        one.page.locator("#plane-go").click()
    for one, seed in ((first, 1), (second, 2)):
        one.expect_status("plane", "Step 100 of 100")
        right = plane.chains("mog", "full", 0.3, count=300, steps=100, seed=seed)
        assert f"MMD {right.mmd:.4f}" in one.status("plane")


def test_who_leaves_gives_their_place_to_others(visit) -> None:
    for _ in range(JOBS):
        one = visit()
        one.room("Sampler")
        one.set("sampler-steps", 100)  # minutes of work
        one.page.locator("#sampler-go").click()
        one.page.locator("#sampler-pictures figure").first.wait_for()
        one.page.close()
    one = visit()
    one.set("plane-steps", 10)
    one.page.locator("#plane-go").click()
    one.expect_status("plane", "Step 10 of 10")


def png_of(width: int, height: int) -> bytes:
    content = io.BytesIO()
    Image.new("1", (width, height)).save(content, format="PNG")
    return content.getvalue()


def noise() -> bytes:
    content = io.BytesIO()
    Image.effect_noise((90, 90), 80).save(content, format="PNG")
    return content.getvalue()


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("text.png", lambda: b"<script>alert(1)</script>" * 20, "not an image of the formats"),
        ("cut.png", lambda: noise()[:4000], "cannot be read"),
        ("bomb.png", lambda: png_of(8000, 8000), "exceeds limit"),
    ],
)
def test_hostile_uploads_are_refused_in_a_sentence(visit, tmp_path: Path, name: str, make, words: str) -> None:
    one = visit()
    one.room("Image")
    one.page.locator("#image-own button").first.click()
    (tmp_path / name).write_bytes(make())
    one.page.locator("#image-upload input[type=file]").set_input_files(tmp_path / name)
    said = one.error()
    assert words in said
    assert "\n" not in said


def test_a_good_upload_is_used_and_a_large_one_is_not_taken(visit, tmp_path: Path) -> None:
    one = visit()
    page = one.page
    one.room("Image")
    page.locator("#image-own button").first.click()
    ramp = numpy.linspace(0, 255, 60 * 40).astype(numpy.uint8).reshape(40, 60)
    Image.fromarray(ramp).save(tmp_path / "good.png")
    page.locator("#image-upload input[type=file]").set_input_files(tmp_path / "good.png")
    page.locator("#image-upload .file-preview").wait_for()
    page.locator("#image-more button").first.click()
    one.set("image-draws", 0)
    one.set("image-components", 0)
    page.locator("#image-go").click()
    one.expect_status("image", "Done")
    with zipfile.ZipFile(one.download("image", tmp_path / "own.zip")) as archive:
        used = numpy.asarray(Image.open(io.BytesIO(archive.read("posterior/image.png"))))
    assert (used == ramp[6:34, 16:44]).all()
    (tmp_path / "large.png").write_bytes(b"\x89PNG" + bytes(9_000_000))
    page.locator("#image-upload button[aria-label=Clear]").click()
    page.locator("#image-upload input[type=file]").set_input_files(tmp_path / "large.png")
    assert "size" in one.error().lower()


def test_every_answer_forbids_other_hosts_and_other_names_are_refused(address: str) -> None:
    with urllib.request.urlopen(address) as answer:
        assert "default-src 'self'" in answer.headers["content-security-policy"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(address, headers={"Host": "elsewhere.example"}))
    refused.value.close()
    assert refused.value.code == 400


def test_it_fits_a_phone(visit) -> None:
    one = visit(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, color_scheme="dark")
    for room in ("Plane", "Image", "Restore", "Sampler"):
        if one.page.get_by_role("tab", name=room, exact=True).count():
            one.room(room)
        assert one.page.evaluate("document.documentElement.scrollWidth") <= 390
