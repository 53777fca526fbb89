"""A click through every room, in a real browser."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy
from PIL import Image
from playwright.sync_api import expect

from mmdgs.studio import plane, restore
from mmdgs.studio.streaming import JOBS


def names_in(file: Path) -> set[str]:
    with zipfile.ZipFile(file) as archive:
        return {Path(name).name for name in archive.namelist()}


def picture_in(file: Path, name: str) -> numpy.ndarray:
    with zipfile.ZipFile(file) as archive:
        return numpy.asarray(Image.open(io.BytesIO(archive.read(name))))


def test_plane_follows_a_click_and_chains_mix(visit, tmp_path: Path) -> None:
    visitor = visit()
    page = visitor.page
    box = page.locator("#plane-picture img").bounding_box()
    place = {"x": 0.75 * box["width"], "y": 0.5 * box["height"]}
    page.locator("#plane-picture img").click(position=place)
    page.wait_for_function("Math.abs(document.querySelector('#plane-x input').value - 1) < 0.05")
    kl = plane.look("mog", 0.3, (float(page.locator("#plane-x input").input_value()), 0.0)).kl
    visitor.expect("plane-panels", f"{kl['full']:.3f}")
    assert names_in(visitor.download("plane", tmp_path / "zip")) == {"plane.png", "plane.npz"}
    visitor.set("plane-steps", 20)
    visitor.click("plane-go")
    status = visitor.expect("plane-status", "Step 20 of 20")
    assert f"MMD {plane.run_chains('mog', 0.3, 'full', steps=20).mmd:.4f}" in status
    visitor.expect("plane-weights", "(right: 25%)")
    visitor.click("plane-lines")
    visitor.expect("plane-command", "mmdgs plane mog --sigma 0.3 --method full")


def test_image_shows_its_posterior_at_once_and_walks(visit, tmp_path: Path) -> None:
    visitor = visit()
    page = visitor.page
    visitor.room("Image")
    visitor.click("image-go")
    visitor.expect("image-status", "Done")
    assert page.locator("#image-pictures .mm-turns img").count() == 4, "draws in one frame"
    assert page.locator("#image-pictures figure").count() == 4
    assert "% of the pixels" in page.locator("#image-status").inner_text()
    before = page.locator("#image-moved img").get_attribute("src")
    visitor.set("image-walk-1", 2)
    expect(page.locator("#image-moved img")).not_to_have_attribute("src", before)
    visitor.expect("image-moved", "+2.0, +0.0, +0.0")
    files = names_in(visitor.download("image", tmp_path / "zip"))
    assert {"arrays.npz", "noisy.npy", "again.py"} <= files


def test_draws_alternate_and_the_uncertainty_fades_in(visit) -> None:
    visitor = visit()
    page = visitor.page
    visitor.room("Image")
    visitor.click("image-go")
    visitor.expect("image-status", "Done")
    turns, fades = (page.locator(f"#image-pictures .mm-{kind}") for kind in ("turns", "fades"))
    for number in (3, 1):  # it goes round
        expect(turns.locator("output")).to_have_text(f"draw {number}")
    turns.locator("button").click()
    expect(turns.locator("button")).to_have_text("Play")
    turns.locator("input").fill("2")
    page.wait_for_timeout(1200)
    expect(turns.locator("output")).to_have_text("draw 3")
    shown = turns.locator("img").evaluate_all("all => all.map(one => one.style.visibility)")
    assert shown == ["hidden", "hidden", "visible", "hidden"]
    spread = fades.locator("img").nth(1)
    expect(spread).to_have_css("opacity", "0")
    fades.locator("input").fill("0.5")
    expect(spread).to_have_css("opacity", "0.5")
    still = visit(reduced_motion="reduce")
    still.room("Image")
    still.click("image-go")
    still.expect("image-status", "Done")
    expect(still.page.locator("#image-pictures .mm-turns button")).to_have_text("Play")


def test_a_photograph_is_worked_on_at_its_own_size(
    visit, photo_address: str, tmp_path: Path
) -> None:
    visitor = visit(photo_address)
    page = visitor.page
    visitor.room("Image")
    expect(page.locator("#image-model input")).to_have_value("photo: any size")
    visitor.click("image-go")
    assert "pload an image" in visitor.error()
    photograph = numpy.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=numpy.uint8)
    Image.fromarray(photograph).save(tmp_path / "own.png")
    page.locator("#image-upload input[type=file]").set_input_files(tmp_path / "own.png")
    visitor.expect("image-status", "90 x 60 pixels of your own: the posterior takes about")
    expect(page.locator("#image-example input")).to_have_value("your image")
    visitor.click("image-go")
    visitor.expect("image-status", "Done")
    first = picture_in(visitor.download("image", tmp_path / "zip"), "posterior/image.png")
    assert (first == photograph).all()
    frame = page.locator("#image-pictures .mm-fades .mm-frame")
    box = frame.bounding_box()
    frame.click(position={"x": 0.5 * box["width"], "y": 0.5 * box["height"]})
    expect(frame.locator("i")).to_be_visible()
    visitor.expect("image-status", "Done")
    visitor.click("image-lines")
    visitor.expect("image-command", "--region 30,20,30,20")
    visitor.click("image-whole")
    expect(page.locator("#image-command")).not_to_contain_text("--region")


def test_an_image_that_is_damaged_already_is_restored(
    visit, photo_address: str, tmp_path: Path
) -> None:
    visitor = visit(photo_address)
    page = visitor.page
    visitor.room("Restore")
    noisy = numpy.random.default_rng(0).normal(128, 20, (24, 32, 3)).clip(0, 255)
    Image.fromarray(noisy.astype(numpy.uint8)).save(tmp_path / "small.png")
    page.locator("#restore-upload input[type=file]").set_input_files(tmp_path / "small.png")
    visitor.expect("restore-status", "32 x 24 pixels of your own: 4 draws take about")
    expect(page.locator("#restore-estimate")).to_be_hidden()
    page.get_by_label("damaged already").click()
    visitor.choose("restore-kind", "missing pixels")
    visitor.click("restore-go")
    assert "paint them" in visitor.error()
    visitor.choose("restore-kind", "super-resolution")
    visitor.set("restore-sr", 2)
    page.locator("#restore-estimate input").check()
    visitor.choose("restore-quality", "fast")
    visitor.click("restore-go")
    visitor.expect("restore-status", "The noise was estimated: 0.0")
    visitor.click("restore-lines")
    command = visitor.expect("restore-command", "--operator sr:2 --noise estimate --quality fast")
    assert "--simulate" not in command
    mean = picture_in(visitor.download("restore", tmp_path / "zip"), "restored/mean.png")
    assert mean.shape == (48, 64, 3)


def test_sliders_show_their_ends_and_offer_what_the_model_knows(visit) -> None:
    visitor = visit()
    page = visitor.page
    visitor.room("Sampler")
    ends = """name => {
        const slider = document.getElementById(name), end = slider.querySelector(".max_value");
        return slider.getBoundingClientRect().right - end.getBoundingClientRect().right;
    }"""
    for width in (700, 800, 1000, 1200):
        page.set_viewport_size({"width": width, "height": 900})
        visitor.settle()
        for name in ("sampler-steps", "sampler-count"):
            assert page.evaluate(ends, name) >= 0, (width, name)
    visitor.room("Image")
    expect(page.locator("#image-sigma input[type=number]")).to_be_disabled()
    visitor.choose("image-model", "cifar10")
    expect(page.locator("#image-sigma input[type=number]")).to_be_enabled()
    visitor.click("image-own")
    upload = page.locator("#image-upload")
    box = upload.bounding_box()
    for words in ("Drop File Here", "Click to Upload"):
        line = upload.get_by_text(words)
        line.wait_for()
        place = line.evaluate(
            """found => {
                const range = document.createRange();
                range.selectNodeContents(found);
                const { top, bottom } = range.getBoundingClientRect();
                return [top, bottom];
            }"""
        )
        assert box["y"] <= place[0] < place[1] <= box["y"] + box["height"], words


def test_each_kind_of_damage_has_a_slider_of_its_own(visit) -> None:
    """So no limits change under a click that comes before the page hears of the new kind."""
    visitor = visit()
    page = visitor.page
    visitor.room("Restore")
    for kind, short in restore.OPERATORS.items():
        visitor.choose("restore-kind", kind, exact=kind == "blur")  # another one is "motion blur"
        for other in restore.STRENGTHS:
            expect(page.locator(f"#restore-{other}")).to_be_visible(visible=other == short)
        if kind == restore.PAINTED:  # Gradio's editor breaks where it is hidden amid its mounting
            page.locator("#restore-paint canvas").first.wait_for()
            page.wait_for_timeout(1000)
    visitor.choose("restore-kind", "missing pixels")
    visitor.click("restore-go")
    visitor.expect("restore-status", "is done")
    visitor.click("restore-lines")
    visitor.expect("restore-command", "--operator random:0.7")
    visitor.click("restore-stop")


def test_restoration_shows_a_kept_example_and_paints_a_mask(visit, tmp_path: Path) -> None:
    visitor = visit()
    page = visitor.page
    visitor.room("Restore")
    visitor.click("restore-go")
    visitor.expect("restore-status", "Done: 4 draws")
    assert "mean.png" in names_in(visitor.download("restore", tmp_path / "kept.zip"))
    visitor.click("restore-more")
    visitor.set("restore-draws", 1)
    visitor.choose("restore-quality", "fast")
    visitor.choose("restore-kind", "paint a mask")
    visitor.click("restore-go")
    assert "Paint over the part" in visitor.error()
    canvas = page.locator("#restore-paint canvas").first
    canvas.wait_for()
    page.wait_for_timeout(1000)
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.5 * box["height"], steps=8)
    page.mouse.up()
    page.wait_for_timeout(500)
    visitor.click("restore-go")
    visitor.expect("restore-status", "Done: 1 draws")
    mask = picture_in(visitor.download("restore", tmp_path / "zip"), "restored/mask.png")
    assert 0.02 < (mask == 0).mean() < 0.5
    assert (mask[16, 16], mask[2, 2]) == (0, 255)


def test_the_stop_button_ends_a_run_and_the_room_goes_on(visit, tmp_path: Path) -> None:
    visitor = visit()
    shown = visitor.page.locator("#sampler-pictures")
    visitor.room("Sampler")
    visitor.choose("sampler-model", "mnist")
    visitor.expect("sampler-samplers", "Gibbs")
    expect(visitor.page.locator("#sampler-samplers input")).to_have_count(1)
    visitor.set("sampler-count", 1)
    visitor.set("sampler-steps", 100)
    stop = visitor.page.locator("#sampler-stop")
    expect(stop).to_be_disabled()
    visitor.click("sampler-go")
    shown.locator("figure").first.wait_for()
    visitor.click("sampler-stop")
    visitor.expect("sampler-status", "Stopped")
    expect(stop).to_be_disabled()
    assert "samples.npz" in names_in(visitor.download("sampler", tmp_path / "zip"))
    before = shown.inner_text()
    visitor.page.wait_for_timeout(1000)
    assert shown.inner_text() == before, "nothing moves after a stop"
    visitor.set("sampler-steps", 5)
    visitor.click("sampler-go")
    visitor.expect("sampler-status", "Done")
    visitor.expect("sampler-pictures", "evaluations a sample")


def test_the_stop_button_ends_a_posterior_between_evaluations(visit, tmp_path: Path) -> None:
    visitor = visit()
    page = visitor.page
    visitor.room("Image")
    visitor.choose("image-model", "cifar10")
    expect(page.locator("#image-example input")).to_have_value("cifar10-car")
    visitor.click("image-more")
    page.locator("#image-seed input").fill("1")  # no result is kept for it
    visitor.click("image-go")
    visitor.expect("image-status", "The mean is there")
    visitor.click("image-stop")
    visitor.expect("image-status", "Stopped")
    assert page.locator("#image-pictures figure").count() == 3, "what was there stays"
    assert "arrays.npz" in names_in(visitor.download("image", tmp_path / "zip"))


def test_another_click_on_go_ends_the_run_before_and_people_see_their_own(visit) -> None:
    first, second = visit(), visit()
    first.set("plane-steps", 900)
    first.click("plane-go")
    first.expect("plane-status", "of 900")
    for visitor, seed in ((first, 1), (second, 2)):
        visitor.set("plane-steps", 20)
        visitor.page.locator("#plane-seed input").fill(str(seed))
        visitor.click("plane-go")
    for visitor, seed in ((first, 1), (second, 2)):
        status = visitor.expect("plane-status", "Step 20 of 20")
        mmd = plane.run_chains("mog", 0.3, "full", steps=20, seed=seed).mmd
        assert f"MMD {mmd:.4f}" in status


def test_who_leaves_gives_their_place_to_others(visit) -> None:
    for _ in range(JOBS):
        visitor = visit()
        visitor.room("Sampler")
        visitor.set("sampler-steps", 100)  # minutes of work
        visitor.click("sampler-go")
        visitor.page.locator("#sampler-pictures figure").first.wait_for()
        visitor.page.close()
    visitor = visit()
    visitor.set("plane-steps", 10)
    visitor.click("plane-go")
    visitor.expect("plane-status", "Step 10 of 10")


def png_of(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, format="PNG")
    return content.getvalue()


def test_hostile_uploads_are_refused_in_a_sentence(visit, tmp_path: Path) -> None:
    visitor = visit()
    visitor.room("Image")
    visitor.click("image-own")
    upload = visitor.page.locator("#image-upload")
    for name, content, words in (  # words of one toast only: those before are shown for a while
        ("text", b"<script>alert(1)</script>" * 20, "not an image"),
        ("cut", png_of(Image.effect_noise((90, 90), 80))[:4000], "truncated"),
        ("bomb", png_of(Image.new("1", (8000, 8000))), "pixels) exceeds limit"),
        ("large", b"\x89PNG" + bytes(9_000_000), "maximum allowed size"),
    ):
        (tmp_path / f"{name}.png").write_bytes(content)
        upload.locator("input[type=file]").set_input_files(tmp_path / f"{name}.png")
        # Gradio drops a change that comes before the refusal of the last one: wait for that.
        toast = visitor.page.locator("[data-testid=toast-text]", has_text=words).first
        toast.wait_for()
        assert "\n" not in toast.inner_text()
        if name != "large":
            upload.locator("button[aria-label=Clear]").click()
            upload.locator(".file-preview").wait_for(state="detached")


def test_a_good_upload_is_used(visit, tmp_path: Path) -> None:
    visitor = visit()
    page = visitor.page
    visitor.room("Image")
    visitor.click("image-own")
    ramp = numpy.linspace(0, 255, 60 * 40).astype(numpy.uint8).reshape(40, 60)
    Image.fromarray(ramp).save(tmp_path / "good.png")
    page.locator("#image-upload input[type=file]").set_input_files(tmp_path / "good.png")
    page.locator("#image-upload .file-preview").wait_for()
    expect(page.locator("#image-example input")).to_have_value("your image")
    page.get_by_label("cut out the centre").first.check()
    visitor.click("image-more")
    visitor.set("image-draws", 0)
    visitor.set("image-components", 0)
    visitor.click("image-go")
    visitor.expect("image-status", "Done")
    used = picture_in(visitor.download("image", tmp_path / "zip"), "posterior/image.png")
    assert (used == ramp[6:34, 16:44]).all()


def test_it_fits_a_phone(visit) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    visitor = visit(color_scheme="dark", **phone)
    for room in ("Plane", "Image", "Restore", "Sampler"):
        if visitor.page.get_by_role("tab", name=room, exact=True).count():
            visitor.room(room)
        assert visitor.page.evaluate("document.documentElement.scrollWidth") <= 390
