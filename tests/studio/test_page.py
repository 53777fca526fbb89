"""What the page keeps of its visitors, without a browser."""

from __future__ import annotations

import asyncio

import gradio as gr
from gradio.state_holder import SessionState

from mmdgs.studio.controls import plainly


async def kept(rounds: int) -> tuple[int, int]:
    """Components of a page, and those of a session after so many answers to each of two outputs."""
    with gr.Blocks(analytics_enabled=False) as page:
        first, second, button = gr.HTML(), gr.Markdown(), gr.Button()
        for one in (first, second):
            button.click(plainly(lambda one=one: {one: "new"}), None, [first, second])
    session = SessionState(page)
    for _ in range(rounds):
        for function in page.fns.values():
            await page.postprocess_data(function, function.fn(), session)
    return len(page.blocks), len(session.blocks_config.blocks)


def test_answers_leave_nothing_behind_in_a_session() -> None:
    before, after = asyncio.run(kept(10))
    assert after == before
