// The TensorRT that loaded this library: which one it is, and its logger.
//
// One binary serves TensorRT 10, TensorRT 11 and TensorRT-RTX. The V3 plugin interfaces have the same layout in all
// of them, but ILogger and ILoggerFinder became versioned interfaces in 11 and with that their virtual functions moved.
// So the host is looked up at run time and its objects are called only by the places of their functions, in host.cpp,
// never through the classes of the headers this library happened to be compiled with.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace twell::host {

enum class Abi {
    kUnknown,
    kTrt10,  // TensorRT 10
    kTrt11,  // TensorRT 11, and TensorRT-RTX from 1.5 on
};

// Equal to nvinfer1::ILogger::Severity.
enum class Severity : int32_t { kError = 1, kWarning = 2, kInfo = 3 };

// Tells which TensorRT implements `object`, an instance of a class with virtual functions.
Abi abi_of(void const* object) noexcept;

// A TensorRT in this process.
struct Host {
    std::string path;       // of the library
    int32_t version;        // 10000 * major + 100 * minor + patch; 0 if it does not say
    Abi abi;                // how to call what follows
    void* registry;         // the IPluginRegistry of the whole process
    void* (*get_logger)();  // its ILogger, or null
};

// Whether a file of this name is the core library of a TensorRT.
bool is_tensorrt(char const* path) noexcept;

// Finds every TensorRT in this process. Loads nothing.
std::vector<Host> find_hosts();

// Adds a creator to the host's registry, unless one of that name, version and namespace is there. Returns whether one
// is there afterwards.
bool add_creator(Host const& host, nvinfer1::IPluginCreatorInterface& creator, char const* name, char const* version,
                 char const* plugin_namespace) noexcept;

// Remembers a host for its logger, for when no ILoggerFinder was given.
void use_logger_of(Host const& host);

// Remembers the host's ILoggerFinder; null forgets it. The latest host wins.
void set_logger_finder(void* finder) noexcept;

// Sends `message` to the host's logger. Without a usable logger, errors go to stderr and the rest is dropped.
void log(Severity severity, char const* message) noexcept;

}  // namespace twell::host
