#!/bin/bash
mkdir data
