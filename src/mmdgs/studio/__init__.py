"""`mmdgs studio`: four rooms in the browser.

plane, image, restore, sampler   the rooms: what each computes, then its controls (`build`)
sources, folder, pictures        what rooms take in, write for download, and show
streaming                        work in threads, which reports its state and can be stopped
controls, page                   what the rooms' controls share, and the page of all rooms
guard, server                    what every request is checked for, and the server

Gradio is an extra: controls and page import it, and the rooms only in `build`.
"""
