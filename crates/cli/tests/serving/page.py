"""A person at the keyboard of the server's page, in a real browser. In: browser, address, key, file for a picture; out: exit code
0, or a failed assertion. The browser is driven over a pipe: no port is opened.
NOT here: starting the server (serving.rs). Needs python3 and nothing else."""

import base64
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

browser, address, key, picture = sys.argv[1:]
profile = tempfile.TemporaryDirectory()
to_browser, from_us = os.pipe()
to_us, from_browser = os.pipe()


def give_pipes():
    # The browser reads from 3 and writes to 4. Out of the way first, as the numbers may be taken.
    a, b = os.dup(to_browser), os.dup(from_browser)
    high = [os.dup2(a, 103), os.dup2(b, 104)]
    os.dup2(high[0], 3)
    os.dup2(high[1], 4)


process = subprocess.Popen(
    [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
     "--disable-component-update", "--disable-sync", "--remote-debugging-pipe", f"--user-data-dir={profile.name}", "--window-size=1100,800"],
    preexec_fn=give_pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
os.close(to_browser)
os.close(from_browser)
left, seen, number, session = b"", [], 0, None


def message():
    global left
    while b"\0" not in left:
        part = os.read(to_us, 1 << 16)
        assert part, "the browser is gone"
        left += part
    one, left = left.split(b"\0", 1)
    return json.loads(one)


def call(method, **params):
    global number
    number += 1
    sent = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
    os.write(from_us, json.dumps(sent).encode() + b"\0")
    while True:
        got = message()
        if got.get("id") == number:
            assert "error" not in got, got
            return got["result"]
        seen.append(got)


def value(expression):
    got = call("Runtime.evaluate", expression=expression, returnByValue=True)
    assert "exceptionDetails" not in got, got
    return got["result"].get("value")


def until(expression, seconds=60):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if value(expression):
            return
        time.sleep(0.05)
    raise AssertionError(f"{expression} does not come true; the page: {value('document.body.innerText')}")


def press(name, code, text=None, **more):
    for kind in ("keyDown", "keyUp"):
        text_too = {"text": text} if text and kind == "keyDown" else {}
        call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, **text_too, **more)


def write(text):
    call("Input.insertText", text=text)


def focused():
    return value("document.activeElement.id || document.activeElement.tagName + ' ' + document.activeElement.textContent")


try:
    target = call("Target.createTarget", url="about:blank")["targetId"]
    session = call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Runtime", "Network", "Page", "Log"):
        call(f"{domain}.enable")
    call("Page.navigate", url=address + "/")
    until("document.readyState === 'complete' && !!document.activeElement && document.activeElement.id === 'say'")
    # Without the key the page says what is missing.
    until("document.getElementById('note').textContent.includes('API key')")

    # Everything that can be used is reached by Tab, in the order of the page, and its focus is seen.
    order = ["say"]
    for _ in range(5):
        press("Tab", 9)
        order.append(focused())
        outline = value("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", (order, outline)
        if order[-1] == "key":
            write(key)
    assert order == ["say", "temperature", "most", "key", "send", "clear"], order
    until("document.getElementById('model').textContent.includes('context')")
    assert value("[...document.querySelectorAll('input, textarea')].every(e => e.labels.length)"), "a field has no label"
    assert value("document.getElementById('talk').getAttribute('aria-live')") == "polite"

    # A question with Enter; its answer is streamed in, and focus is back in the box.
    value("document.getElementById('temperature').value = 0; document.getElementById('say').focus()")
    write("What is the capital of France? Answer in one word.")
    press("Enter", 13, text="\r")
    until("!document.getElementById('send').disabled && !!document.querySelector('#talk .assistant')")
    answer = value("document.querySelector('#talk .assistant').textContent")
    assert "Paris" in answer, answer
    assert focused() == "say"
    until("document.getElementById('note').textContent.includes('tokens in')")

    # A long answer shows in the figures, and Escape ends it.
    value("document.getElementById('most').value = 4000")
    write("Write a very long story about a ship.")
    press("Enter", 13, text="\r")
    until("document.querySelectorAll('#requests td').length === 4 && document.getElementById('states').textContent.startsWith('1, ')")
    until("Number(document.getElementById('tok_s').textContent) > 0")
    call("Page.captureScreenshot")
    pathlib.Path(picture).write_bytes(base64.b64decode(call("Page.captureScreenshot")["data"]))
    press("Escape", 27)
    until("document.getElementById('note').textContent === 'Stopped.'")
    until("document.getElementById('states').textContent.startsWith('0, 0')")

    # Nothing came from elsewhere, and nothing was wrong but the requests without the key.
    asked = [e["params"]["request"]["url"] for e in seen if e.get("method") == "Network.requestWillBeSent"]
    assert asked and all(url.startswith((address + "/", "data:", "about:")) for url in asked), asked
    failed = [e["params"] for e in seen if e.get("method") == "Runtime.exceptionThrown"]
    assert not failed, failed
    wrong = [e["params"]["entry"] for e in seen if e.get("method") == "Log.entryAdded" and e["params"]["entry"]["level"] == "error"]
    assert all("401" in entry["text"] for entry in wrong), wrong
    print("ok")
finally:
    process.kill()
    process.wait()
