"""Convolutional networks on image classification: ResNet, VGG, EfficientNet-Lite0, and others."""

from .family import Cnn, CnnConfig

__all__ = ["Cnn", "CnnConfig"]
