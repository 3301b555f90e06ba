"""Names and limits that `--help` shows.

They are separate from the modules that implement them, so that help imports neither torch nor any other large package.
This module imports nothing.
"""

# The default number of concurrent callers of the objective `requests`.
CALLERS = 4
BENCH_PRECISIONS = ("eager", "tf32", "autocast", "bf16", "fp16")
GENERATION_PRECISIONS = ("auto", "fp32", "bf16", "fp16", "int8", "fp8")
STREAM_PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
SAMPLER_NAMES = ("ddim", "dpm_solver", "flow_euler", "distilled")
SERVER_ENDPOINTS = ("auto", "chat", "completions")
UPSCALE_PRESETS = ("speed", "balanced", "memory", "quality")

# Images with more pixels than this are refused by default.
PIXEL_LIMIT = 1_000_000_000

# The file name suffixes of videos that a stream can write, with FFmpeg's names of the container formats.
VIDEO_CONTAINERS = {".mp4": "mp4", ".mov": "mov", ".mkv": "matroska"}
STREAM_SOURCES = (
    "a video file, a folder of images[@FPS], webcam[:N][:WxH@FPS,FORMAT], /dev/videoN, rtsp://… or http://…, browser, "
    "or synthetic[:WxH@FPS,SECONDS]"
)
STREAM_SINKS = (
    f"a video file ({', '.join(VIDEO_CONTAINERS)}), a folder/, browser, window, mjpeg[:PORT], virtual-camera, or null"
)
