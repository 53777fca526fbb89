"""`mmdgs studio`: four rooms in the browser. Gradio is imported by controls, the rooms, page and server alone.

plane, image, restoring, sampling    what each room computes: plain functions from settings to arrays and pictures
sources                              models, examples, uploads, and results that are kept
streaming                            work in a thread that tells how far it is and can be stopped
pictures                             pictures as HTML with words under them
downloads                            files for download, in a folder that is emptied, and whose they are
visitors, guard                      who visits, and what they may ask: host, token, route, file, bytes
controls, room_plane ...             what pages share, and the controls of each room
page, server                         the page of all rooms, and what serves it
"""
