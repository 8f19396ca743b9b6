"""Frames of video files. Needs PyAV."""

from penstock.pipeline.video.frames import Frame, Sampling, VideoInfo, probe, read_frames

__all__ = ["Frame", "Sampling", "VideoInfo", "probe", "read_frames"]
