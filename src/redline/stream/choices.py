"""Names and limits that `--help` shows, in a module of their own, because help imports no large package."""

STREAM_PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
SAMPLER_NAMES = ("ddim", "dpm_solver", "flow_euler", "distilled")

# The file name suffixes of videos that a stream can write, with FFmpeg's names of the container formats.
VIDEO_CONTAINERS = {".mp4": "mp4", ".mov": "mov", ".mkv": "matroska"}
STREAM_SOURCES = (
    "a video file, a folder of images[@FPS], webcam[:N][:WxH@FPS,FORMAT], /dev/videoN, rtsp://… or http://…, browser, "
    "or synthetic[:WxH@FPS,SECONDS]"
)
STREAM_SINKS = (
    f"a video file ({', '.join(VIDEO_CONTAINERS)}), a folder/, browser, window, mjpeg[:PORT], virtual-camera, or null"
)
